"""Which of Chroma's collections a tenant's name stands for."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ragspec.corpus.naming import MAX_CHARS, check_name, owner_of, physical_name
from ragspec.errors import InputError
from ragspec.jobs.tenant import DEFAULT_TENANT

ACME, GLOBEX = UUID(int=0xACE), UUID(int=0x61)
TENANTS = st.sampled_from([DEFAULT_TENANT, ACME, GLOBEX]) | st.uuids()
NAMES = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,60}[a-zA-Z0-9]", fullmatch=True)
#: What someone might choose who wants to be taken for another.
FORGED = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["tenant-", "Tenant-", "tenant_", "tenant--", ""]),
    st.sampled_from([ACME.hex, ACME.hex.upper(), str(ACME), GLOBEX.hex, DEFAULT_TENANT.hex, ACME.hex[:-1]]),
    st.sampled_from(["-", "--", ".", ""]),
    NAMES,
)


@given(TENANTS, NAMES | FORGED)
def test_a_physical_name_is_one_that_chroma_takes_and_leads_back_to_its_owner(tenant_id: UUID, name: str) -> None:
    try:
        physical = physical_name(tenant_id, name)
    except InputError:
        return

    check_name(physical)
    assert owner_of(physical) == (tenant_id, name)


@given(TENANTS, NAMES | FORGED, TENANTS, NAMES | FORGED)
def test_two_tenants_names_never_meet(one: UUID, name: str, other: UUID, other_name: str) -> None:
    assume((one, name) != (other, other_name))
    try:
        physical, other_physical = physical_name(one, name), physical_name(other, other_name)
    except InputError:
        return

    assert physical != other_physical


@given(TENANTS, TENANTS, NAMES)
def test_nobody_can_name_another_tenants_collection_by_its_physical_name(one: UUID, other: UUID, name: str) -> None:
    assume(one != other)
    assume(one != DEFAULT_TENANT)
    try:
        theirs = physical_name(one, name)
    except InputError:
        return

    if other == DEFAULT_TENANT:
        with pytest.raises(InputError, match="begins as the collections of another tenant"):
            physical_name(other, theirs)
    else:
        assert physical_name(other, theirs) != theirs


@given(st.text(max_size=80) | NAMES | FORGED)
def test_what_has_an_owner_is_what_the_owner_would_be_given(physical: str) -> None:
    owner = owner_of(physical)

    assert owner is None or physical_name(*owner) == physical


def test_the_default_tenants_names_are_chromas_own() -> None:
    assert physical_name(DEFAULT_TENANT, "handbook") == "handbook"
    assert physical_name(DEFAULT_TENANT, "tenant-handbook") == "tenant-handbook"
    assert physical_name(ACME, "handbook") == f"tenant-{ACME.hex}-handbook"


def test_a_name_that_nobody_can_have_given_has_no_owner() -> None:
    for physical in (f"tenant-{ACME.hex}-ab", f"tenant-{DEFAULT_TENANT.hex}-handbook", f"tenant-{ACME.hex}-", "a..b"):
        assert owner_of(physical) is None


def test_the_longest_name_of_a_tenant_fits_and_a_longer_one_is_refused() -> None:
    room = MAX_CHARS - len(f"tenant-{ACME.hex}-")

    check_name(physical_name(ACME, "x" * room))
    with pytest.raises(InputError, match=f"may have {room}") as caught:
        physical_name(ACME, "x" * (room + 1))
    assert caught.value.error_code == "bad_collection_name"


@pytest.mark.parametrize("name", ["ab", "-abc", "abc-", "a..b", "10.0.0.1", "a/b", "Grüße", "a b c", "handbook\n"])
def test_a_name_that_chroma_refuses_is_refused_for_every_tenant(name: str) -> None:
    for tenant_id in (DEFAULT_TENANT, ACME):
        with pytest.raises(InputError, match="cannot be a collection's name"):
            physical_name(tenant_id, name)

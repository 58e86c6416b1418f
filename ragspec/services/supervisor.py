"""`ragspec up`: starts the parts in order, watches them, starts again what dies, and stops all of them together."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from ragspec.errors import ServiceUnavailableError
from ragspec.services.child import Child, await_health, start, stop
from ragspec.services.home import prepare_home, speaking_of
from ragspec.services.interrupts import Interrupts
from ragspec.services.part import Part
from ragspec.services.plan import Configured, plan_stores, plan_workers
from ragspec.services.ports import choose_port
from ragspec.services.preflight import check_stores, check_worker
from ragspec.services.record import ProcessId, Record, State, end, forget_record, hold_home, read_record
from ragspec.services.secret import write_secret
from ragspec.services.worker import forget_dead_workers
from ragspec.settings import SERVICES_FILE, Settings, load_settings, mask_url

#: Deaths in a row after which a part is given up, and all the others with it.
MOST_DEATHS = 5
#: Seconds that a part has to live for its earlier deaths to be forgiven.
CALM = 60.0
#: Seconds between two looks at the parts; the end of one is noticed at once.
_LOOK_EVERY = 1.0
#: Parts that listen on a port of their own setting.
FRONTS = ("flower", "gateway")
#: Seconds that a configured store has to answer.
_PATIENCE = 3.0

Say = Callable[[str], None]


@dataclass(slots=True)
class _Watched:
    """A child and its history; times are of the monotonic clock."""

    child: Child
    since: float
    well: bool = False
    deaths: int = 0
    again_at: float | None = None


def run_up(say: Say, *, with_worker: bool = True, fronts: Sequence[str] = FRONTS) -> None:
    """Run everything until Ctrl-C or SIGTERM. Call it from the main thread of a process that has no other.

    Args:
        say: prints a line.
        with_worker: run a worker and beat.
        fronts: what listens on a port of its own, of `FRONTS`.

    Raises:
        SettingsError: a setting is known to be wrong before anything is started.
        ConflictError: another `ragspec up` runs in this home (code `already_running`).
        ServiceUnavailableError: a part cannot be started or was given up; everything is stopped by then.
    """
    settings = load_settings()
    (check_worker if with_worker else check_stores)(settings)
    home = settings.home
    prepare_home(home)
    with speaking_of(home), hold_home(home):
        if record := read_record(home):
            for leftover in end(record.children):
                say(f"{leftover.name}: ended process {leftover.pid}, left behind by an earlier `ragspec up`")
        forget_record(home)
        forget_dead_workers(home)
        # Addresses of services that are gone would pass for configured ones.
        (home / SERVICES_FILE).unlink(missing_ok=True)
        with Interrupts() as interrupts:
            _Supervisor(load_settings(), interrupts, say).run(fronts, with_worker=with_worker)


class _Supervisor:
    """The parts of one `ragspec up`."""

    def __init__(self, settings: Settings, interrupts: Interrupts, say: Say) -> None:
        self._settings = settings
        self._home = settings.home
        self._interrupts = interrupts
        self._print = say
        self._watched: list[_Watched] = []
        self._state: State = "starting"

    def run(self, fronts: Sequence[str], *, with_worker: bool) -> None:
        """Start, watch, stop; a request to stop is heeded between any two steps."""
        self._record()
        try:
            self._start(fronts, with_worker=with_worker)
            while not self._interrupts.stopping:
                self._look()
                self._interrupts.wait(_LOOK_EVERY)
        finally:
            self._stop()

    def _start(self, fronts: Sequence[str], *, with_worker: bool) -> None:
        ports = {}
        for front in fronts:
            ports[front], remark = choose_port(self._settings, front)
            if remark:
                self._say(remark)
        stores = plan_stores(self._settings)
        self._bring_up(store for store in stores.values() if isinstance(store, Part))
        for store in stores.values():
            if isinstance(store, Configured):
                self._require(store)
        urls = {field: store.url for field, store in stores.items()}
        if self._interrupts.stopping:
            return
        self._migrate(urls["database_url"])
        workers = plan_workers(self._settings, urls, with_worker=with_worker, ports=ports)
        addresses = {f"{part.name}_url": part.url for part in workers if part.name in ports}
        self._publish({**urls, **dict.fromkeys((f"{front}_url" for front in FRONTS), None), **addresses})
        self._bring_up(workers)
        if not self._interrupts.stopping:
            self._state = "ready"
            self._show(stores)
            self._record()

    def _bring_up(self, parts: Iterable[Part]) -> None:
        """Start all of them, then wait for each to be well."""
        fresh = []
        for part in parts:
            if self._interrupts.stopping:
                return
            fresh.append(_Watched(start(part), time.monotonic()))
            self._watched.append(fresh[-1])
            self._record()
        for watched in fresh:
            await_health(watched.child, lambda: self._interrupts.stopping, self._say)
            if self._interrupts.stopping:
                return
            watched.well = True
            self._say(f"{watched.child.part.name}: well")

    def _require(self, store: Configured) -> None:
        deadline = time.monotonic() + _PATIENCE
        while (fault := store.probe(store.url)) is not None and not self._interrupts.stopping:
            if time.monotonic() > deadline:
                raise ServiceUnavailableError(
                    f"{store.variable}={mask_url(store.url)} does not answer: {fault}.",
                    f"Start it, correct {store.variable}, or unset it to have one started here.",
                )
            self._interrupts.wait(0.5)
        self._say(f"{store.variable} is set: using {mask_url(store.url)}, starting none here")

    def _migrate(self, database_url: str) -> None:
        from ragspec.jobs.database import upgrade

        upgrade(database_url)
        self._say("database: schema is up to date")

    def _publish(self, urls: dict[str, str | None]) -> None:
        """Tell every other command where the services are; the file is this user's alone, it holds passwords."""
        found = {**urls, "pid": os.getpid(), "started_at": datetime.now(UTC).isoformat(timespec="seconds")}
        write_secret(self._home / SERVICES_FILE, json.dumps(found, indent=1))

    def _show(self, stores: dict[str, Part | Configured]) -> None:
        rows = [
            (store.variable, "not ours", mask_url(store.url))
            for store in stores.values()
            if isinstance(store, Configured)
        ]
        for watched in self._watched:
            part, pid = watched.child.part, watched.child.process.pid
            rows.append((part.name, f"process {pid}", mask_url(part.url) if part.url else "-"))
        width = max(len(name) for name, _, _ in rows)
        self._say("")
        for name, process, address in rows:
            self._say(f"{name:<{width}}  {process:<16}  {address}")
        self._say(f"Logs: {self._home / 'logs'}. Ctrl-C or `ragspec down` stops everything.")

    def _look(self) -> None:
        """See to what died, what is due to start again, and what is getting well."""
        for watched in self._watched:
            now = time.monotonic()
            part = watched.child.part
            if watched.again_at is not None:
                if now >= watched.again_at:
                    watched.child, watched.since, watched.again_at = start(part), now, None
                    self._record()
            elif not watched.child.running:
                self._mourn(watched, now)
            elif not watched.well:
                doing = part.probe(watched.child.process.pid)
                if doing is None:
                    watched.well = True
                    self._say_now(f"{part.name}: well again, process {watched.child.process.pid}")
                elif now - watched.since > part.start_timeout:
                    self._say_now(f"{part.name}: not well after {part.start_timeout:.0f} s ({doing})")
                    stop(watched.child, lambda: self._interrupts.hurried)
                    self._mourn(watched, now)

    def _mourn(self, watched: _Watched, now: float) -> None:
        child, name = watched.child, watched.child.part.name
        stop(child)  # what it left in its session
        watched.deaths = 1 if now - watched.since > CALM and watched.well else watched.deaths + 1
        watched.well = False
        fate = f"{name}: process {child.process.pid} {child.fate()}"
        if watched.deaths > MOST_DEATHS:
            raise ServiceUnavailableError(
                f"{fate}, for the {watched.deaths}th time in a row; everything is being stopped.",
                f"The end of {child.part.log}:\n{child.last_words()}",
                code="gave_up",
            )
        pause = 2.0 ** (watched.deaths - 1)
        watched.again_at = now + pause
        self._say_now(
            f"{fate}; starting it again in {pause:.0f} s ({watched.deaths} of {MOST_DEATHS}); log: {child.part.log}"
        )

    def _stop(self) -> None:
        self._state = "stopping"
        self._say_now("stopping")
        with suppress(OSError):  # a full disk must not keep us from stopping
            self._record()
        for watched in reversed(self._watched):
            stop(watched.child, lambda: self._interrupts.hurried)
        (self._home / SERVICES_FILE).unlink(missing_ok=True)
        forget_record(self._home)
        self._say_now("stopped")

    def _record(self) -> None:
        named = [("ragspec up", os.getpid()), *((w.child.part.name, w.child.process.pid) for w in self._watched)]
        supervisor, *children = (ProcessId.of(name, pid) for name, pid in named)
        if supervisor is not None:
            Record(supervisor, self._state, tuple(child for child in children if child)).write(self._home)

    def _say(self, line: str) -> None:
        # Whoever read our output may be gone (`ragspec up | head`); that is no reason to leave the parts alone.
        with suppress(OSError):
            self._print(line)

    def _say_now(self, line: str) -> None:
        self._say(f"{datetime.now().astimezone():%H:%M:%S} {line}")

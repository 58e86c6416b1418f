"""The documentation is true to the code: links lead somewhere, commands exist, generated pages are up to date."""

from __future__ import annotations

import ast
import importlib.util
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ragspec.cli import VERBS, cli
from ragspec.corpus.passage import Passage
from ragspec.prompt.builder import PromptBuilder
from ragspec.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GENERATED: dict[Path, str] = runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]()
#: What the tests read; all others are settings.
TEST_VARIABLE = re.compile(r"RAGSPEC_TEST_\w+")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OPERATORS = set("|&;<>()")


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", page.read_text())


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The page's code blocks in one of the languages."""
    return (body for language, body in FENCE.findall(page.read_text()) if language in languages)


def shell_lines(page: Path) -> Iterator[str]:
    """Every command line shown in a block: all lines of `bash`, those with a prompt of `console`."""
    for body in blocks(page, "bash", "sh"):
        yield from (line for line in body.replace("\\\n", " ").splitlines() if line.strip())
    for body in blocks(page, "console"):
        yield from (line[2:] for line in body.replace("\\\n", " ").splitlines() if line.startswith("$ "))


def invocations(line: str) -> Iterator[list[str]]:
    """The arguments of each `ragspec` in a shell line, also of those inside `$(...)`."""
    for inner in re.findall(r"\$\((ragspec [^)]*)\)", line):
        yield from invocations(inner)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= OPERATORS:
            words.append(word)
            continue
        if "ragspec" in words:
            yield words[words.index("ragspec") + 1 :]
        words = []


def resolve(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The verb that the arguments begin with, and the rest of them."""
    command: click.Command = cli
    rest = list(arguments)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None, f"ragspec {' '.join(arguments)}: no such verb"
        command, rest = found, rest[1:]
    return command, rest


SHOWN = [(page, line, args) for page in PAGES for line in shell_lines(page) for args in invocations(line)]
MENTIONED = sorted(
    {
        (page, span)
        for page in PAGES
        for span in re.findall(r"`([^`]*)`", " ".join(prose(page).split()))
        if re.match(r"ragspec [a-z-]", span)
    }
)


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_a_generated_page_is_what_the_code_says(path: Path) -> None:
    assert path.read_text() == GENERATED[path], "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    relative = [link.partition("#")[0] for link in links if "://" not in link]

    assert [link for link in relative if link and not (page.parent / link).exists()] == []


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)]+\.md)\)", index.read_text())}

    assert [page for page in index.parent.rglob("*.md") if page not in linked | {index}] == []


@pytest.mark.parametrize(("page", "line", "arguments"), SHOWN, ids=[line for _, line, _ in SHOWN])
def test_a_shown_command_could_be_run(page: Path, line: str, arguments: list[str]) -> None:
    """Parsed by click as it would be, required options and choices included, and not run."""
    command, rest = resolve(arguments)

    command.make_context(command.name, rest)


@pytest.mark.parametrize(("page", "span"), MENTIONED, ids=[span for _, span in MENTIONED])
def test_a_mentioned_command_and_its_options_exist(page: Path, span: str) -> None:
    """In running text a command may lack its arguments, and `a|b` names several verbs."""
    verb, *words = span.split()[1:]
    command, rest = resolve([verb, *words])
    options = {option for parameter in command.params for option in parameter.opts} | {"--help", "--version"}

    assert {word for word in rest if word.startswith("-")} <= options


def test_enough_is_found_to_be_tested() -> None:
    """A change of form must not leave the tests above with nothing to look at."""
    assert len(SHOWN) > 30
    assert len(MENTIONED) > 20
    assert {args[0] for _, _, args in SHOWN} | {span.split()[1] for _, span in MENTIONED} >= set(VERBS)


def test_every_setting_that_is_named_exists() -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    named = {
        (page.name, name) for page in PAGES for name in re.findall(r"RAGSPEC_[A-Z_]*[A-Z]\b(?!_)", page.read_text())
    }

    assert {(page, name) for page, name in named if name not in known and not TEST_VARIABLE.fullmatch(name)} == set()


CODED = {"code", "error_code"}
#: Which argument of these is a code.
CODE_ARGUMENT = {"NotAskableError": 0, "RowFault": 1, "Failed": 0}
#: Codes that stand inside SQL, or in what is printed.
SPELLED_OUT = {"duplicate_custom_id", "too_many_attempts", "unknown_setting"}


def codes(source: str) -> Iterator[str]:
    """The error codes that a module gives: keywords and assignments named `code`, and arguments that are one."""
    for node in ast.walk(ast.parse(source)):
        given: list[ast.expr | None] = []
        if isinstance(node, ast.Call):
            given += [keyword.value for keyword in node.keywords if keyword.arg in CODED]
            place = CODE_ARGUMENT.get(ast.unparse(node.func), len(node.args))
            given += node.args[place : place + 1]
        elif isinstance(node, ast.AnnAssign):
            given += [node.value] if ast.unparse(node.target) in CODED else []
        elif isinstance(node, ast.Assign):
            given += [node.value] if ast.unparse(node.targets[0]) in CODED else []
        for value in given:
            # A conditional expression gives either of two; anything but a plain name is no code.
            found = [part.value for part in ast.walk(value) if isinstance(part, ast.Constant)] if value else []
            yield from (code for code in found if isinstance(code, str) and re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", code))


def test_every_error_code_is_explained_and_every_explained_one_exists() -> None:
    packages = ("ragspec", "producer", "worker", "migrations")
    sources = [path.read_text() for package in packages for path in (ROOT / package).rglob("*.py")]
    given = {code for source in sources for code in codes(source)}
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
    explained = {code for row in rows for code in re.findall(r"`(\w+)`", row)}

    assert len(given) > 60
    assert all(any(code in source for source in sources) for code in SPELLED_OUT)
    assert given | SPELLED_OUT == explained


def test_every_make_target_and_benchmark_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(page.read_text() for page in PAGES)

    assert set(re.findall(r"`make ([a-z]+)", text)) | set(re.findall(r"^make ([a-z]+)", text, re.MULTILINE)) <= targets
    for module in re.findall(r"-m (benchmarks\.\w+)", text):
        assert importlib.util.find_spec(module), module


def test_every_file_of_ours_that_is_named_exists() -> None:
    """Paths from the root in code spans of the architecture, the discussion and the guide for contributors."""
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md", *(ROOT / "docs" / "discussion").glob("*.md")]
    folders = "ragspec|producer|worker|migrations|tests|docs|deploy|benchmarks"
    named = {name for page in pages for name in re.findall(rf"`((?:{folders})/[\w/.-]*)`", prose(page))}

    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_test_that_is_named_exists() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))

    for name in re.findall(r"`(test_\w+)`", pages):
        assert f"def {name}(" in source, name
    for name in re.findall(r"`(?:[\w/]+/)?(test_\w+\.py)`", pages):
        assert list((ROOT / "tests").rglob(name)), name


def test_the_example_prompt_template_renders(tmp_path: Path) -> None:
    from tests import tiny

    (body,) = blocks(ROOT / "docs" / "howto" / "prompt-template.md", "jinja")
    (tmp_path / "prompt.jinja").write_text(body)
    builder = PromptBuilder(tiny.tokenizer(), 512, tmp_path / "prompt.jinja")

    prompt = builder.build("Who signs?", [Passage("p1", "Bob signs.", 0.9, "rules.md")], max_tokens=32)

    assert tiny.tokenizer().decode(prompt.token_ids) == (
        "Answer in one sentence, in the words of the passages.\n\n"
        "[1] rules.md\nBob signs.\n\nQuestion: Who signs?\nAnswer:"
    )

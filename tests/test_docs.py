"""README.md and docs/ say what is so: their code runs, its output is as shown, and their commands exist."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from typer.main import get_command

import agentkv
import agentkv.backends
import agentkv.errors
from agentkv.cli.main import app
from agentkv.entries import Carrier, RebaseReason
from agentkv.miss import Miss
from agentkv.plan import Mode
from agentkv.report import TurnReport
from agentkv.segments import Deletion
from agentkv.template import TemplateTraits
from agentkv.testing import ScriptedBackend
from benchmarks import overhead, turns

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
ANSWERS = re.compile(r"^<!-- tests: the backend answers (\[.*\]) -->$", re.MULTILINE)
OUTPUT = "output"
"""Note before a block that must be what the block before it printed."""
OUTPUT_BUT_NUMBERS = "output; numbers vary"
"""The same, where every number may be another."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    line: int
    language: str
    note: str
    body: str


class PageError(AssertionError):
    """A page shows what is not so."""


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [
        Block(
            text.count("\n", 0, found.start("body")) + 1,
            found["language"],
            found["note"] or "",
            found["body"],
        )
        for found in FENCE.finditer(text)
    ]


def run_page(text: str, name: str, namespace: dict[str, object]) -> int:
    """Run a page's Python blocks in order; returns how many outputs were compared."""
    printed = ""
    compared = 0
    for block in blocks(text):
        if block.language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                # Empty lines in front make line numbers in a traceback those of the page.
                source = "\n" * (block.line - 1) + block.body
                exec(compile(source, name, "exec", dont_inherit=True), namespace)
            printed = out.getvalue()
        elif block.note in (OUTPUT, OUTPUT_BUT_NUMBERS):
            shown, real = block.body, printed
            if block.note == OUTPUT_BUT_NUMBERS:
                shown, real = NUMBER.sub("0", shown), NUMBER.sub("0", real)
            if shown.strip() != real.strip():
                raise PageError(f"{name}:{block.line} shows\n{block.body}\nbut this is printed:\n{printed}")
            compared += 1
    return compared


def scripted(text: str) -> ScriptedBackend:
    """Return the backend that a page is given: it answers as the page's hidden comment says."""
    found = ANSWERS.search(text)
    return ScriptedBackend(json.loads(found[1]) if found else ["OK."])


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module for a page's names: dataclasses look their annotations up in one."""
    made = types.ModuleType("page_of_the_docs")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


ON_SERVER = "<!-- tests: needs the vLLM server -->"
"""In a page whose blocks `tests/server/test_docs_on_server.py` runs."""


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if ON_SERVER not in page.read_text(encoding="utf-8")],
    ids=lambda page: page.name,
)
def test_every_python_block_runs_and_prints_what_is_shown(
    page: Path,
    module: types.ModuleType,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Blocks run in order in one namespace; a page that loads the small model gets the tests' copy of it."""
    text = page.read_text(encoding="utf-8")
    if "from agentkv.models import" in text:
        folder = request.getfixturevalue("small_model_dir")
        resolve = agentkv.models.resolve  # type: ignore[attr-defined]  # loaded by the fixture
        monkeypatch.setattr("agentkv.models.resolve", lambda _: resolve(folder))
    monkeypatch.delenv("AGENTKV_MODE", raising=False)
    monkeypatch.chdir(tmp_path)
    vars(module)["backend"] = scripted(text)
    run_page(text, page.name, vars(module))


def test_a_wrong_output_is_found() -> None:
    """The checker fails on a page whose output differs."""
    page = '```python\nprint("one 1")\n```\n\n<!-- output -->\n```text\none 2\n```\n'
    with pytest.raises(PageError, match=r"page\.md:7"):
        run_page(page, "page.md", {})
    assert run_page(page.replace("output", OUTPUT_BUT_NUMBERS), "page.md", {}) == 1


def test_a_block_that_fails_is_found() -> None:
    """An exception in a block is not swallowed."""
    with pytest.raises(ZeroDivisionError):
        run_page("```python\n1 / 0\n```\n", "page.md", {})


def shell_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of every shell block, with the page that shows them."""
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language in ("sh", "shell", "bash", "console"):
                for line in block.body.replace("\\\n", " ").splitlines():
                    words = shlex.split(line, comments=True)
                    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                        words.pop(0)
                    if words:
                        yield page.name, words


def _check_agentkv(words: list[str]) -> str | None:
    command = get_command(app)
    rest = list(words)
    while rest and hasattr(command, "commands"):
        name = rest.pop(0)
        if name.startswith("-"):
            break
        if name not in command.commands:
            return f"agentkv knows no {name!r}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    unknown = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]
    return f"unknown options {unknown}" if unknown else None


def _check_module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"there is no module {name}"


def _check_make(words: list[str]) -> str | None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    missing = [word for word in words if "=" not in word and word not in targets]
    return f"make has no {missing}" if missing else None


def _check_pip(words: list[str]) -> str | None:
    theirs = [
        folder for folder in (ROOT / "integrations").iterdir() if f"{folder.name}-agentkv" in str(words)
    ]
    folder = theirs[0] if theirs else ROOT
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {
        extra.strip()
        for word in words
        for found in re.findall(r"\[(.*)\]", word)
        for extra in found.split(",")
    }
    missing = asked - set(project["optional-dependencies"])
    return f"there is no extra {missing}" if missing else None


def check_command(words: list[str]) -> str | None:
    """Say what is wrong with a command; None if nothing is."""
    program = words[0].rpartition("/")[2]
    if program == "make":
        return _check_make(words[1:])
    if program == "agentkv":
        return _check_agentkv(words[1:])
    if program.startswith("python") and words[1:2] == ["-m"]:
        return _check_agentkv(words[3:]) if words[2] == "agentkv" else _check_module(words[2])
    if program == "pip":
        return _check_pip(words[1:])
    if program in ("git", "cd", "vllm"):
        return None
    return None if (ROOT / words[0]).exists() else f"there is no {words[0]}"


def test_every_command_in_a_shell_block_exists() -> None:
    """Targets of make, sub-commands and options of agentkv, modules and extras are there."""
    found = list(shell_lines())
    assert found
    wrong = [
        f"{page}: {' '.join(words)}: {problem}" for page, words in found if (problem := check_command(words))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "make nothing",
        "agentkv model nothing",
        "agentkv inspect x --nothing",
        "python -m no.such",
        "pip install '.[no]'",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    """The checker fails on commands that are not there."""
    with contextlib.suppress(ModuleNotFoundError):
        assert check_command(shlex.split(line))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Files exist, and headings for the part behind #."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, (
                target
            )


def test_every_room_on_the_map_is_there() -> None:
    """Each path that the map of AGENTS.md names exists."""
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    rooms = re.findall(r"`([a-z]+/[\w./]*)`", text.partition("## Map")[2].partition("## Rules")[0])
    assert len(rooms) > 20
    assert [room for room in rooms if not (ROOT / room).exists()] == []


def text_of(name: str) -> str:
    """Return a page of docs/."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("package", [agentkv, agentkv.backends], ids=lambda module: module.__name__)
def test_every_public_name_stands_in_the_list(package: types.ModuleType) -> None:
    """docs/api.md mentions each name that can be imported from the package."""
    listed = set(re.findall(r"`([A-Za-z_]+)`", text_of("api.md")))
    assert set(package.__all__) - listed == set()


def test_every_error_stands_in_the_list() -> None:
    """docs/api.md mentions each error class."""
    errors = {name for name, made in vars(agentkv.errors).items() if isinstance(made, type)}
    assert errors - set(re.findall(r"`([A-Za-z_]+)`", text_of("api.md"))) == set()


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("errata.md", [reason.value for reason in RebaseReason]),
        ("errata.md", [carrier.value for carrier in Carrier]),
        ("errata.md", [f"`{how.name}`" for how in Deletion]),
        ("reports.md", [miss.value for miss in Miss]),
        ("reports.md", [f"`{field.name}`" for field in fields(TurnReport)]),
        ("reports.md", [f'`"{mode.value}"`' for mode in Mode]),
        ("templates.md", [f"`{field.name}`" for field in fields(TemplateTraits)]),
    ],
)
def test_the_tables_leave_nothing_out(page: str, words: list[str]) -> None:
    """Every reason, carrier, deletion, miss, field and trait stands in its page."""
    text = " ".join(text_of(page).split())
    assert [word for word in words if word not in text] == []


def test_the_thresholds_are_those_of_the_benchmarks() -> None:
    """docs/benchmarks.md names the limits that the benchmarks check."""
    text = text_of("benchmarks.md")
    assert f"{turns.LEAST_TTFT_RATIO:g} times" in text
    assert f"{overhead.MEDIAN_LIMIT_MS:g} ms" in text
    assert f"{overhead.GROWTH_LIMIT:g} times" in text

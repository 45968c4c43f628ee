"""``agentkv doctor`` against a stand-in: what it prints, and how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.main import get_command
from typer.testing import CliRunner

from agentkv.cli.main import app
from agentkv.doctor import CHECKS
from tests.stub_server import MODEL, Quirk, StubServer
from tests.templates import FAMILIES, transformers_tokenizer

KEY = "sk-very-secret-key"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that holds the stand-in's tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers_tokenizer(FAMILIES["qwen"]).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests may hold one."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def doctor(*words: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["doctor", *words])


def test_every_check_is_a_line(tokenizer: str) -> None:
    """Status, name and what was found stand in columns; the exit status is 0, and nothing is on stderr."""
    with StubServer() as server:
        done = doctor(server.url, "--tokenizer", tokenizer)
    lines = done.stdout.splitlines()
    assert done.exit_code == 0
    assert done.stderr == ""
    assert [line[13:].split("  ")[0] for line in lines] == [check.name for check in CHECKS]
    assert lines[2].split("  ")[-1].strip() == "stub, 8,192 tokens of prompt and answer together"
    assert {line[:11].strip() for line in lines} == {"ok"}


def test_a_failure_is_followed_by_its_fix(tokenizer: str) -> None:
    """The exit status is 1, and the line behind the failed check names the flag."""
    with StubServer({Quirk.NO_DETAILS}) as server:
        done = doctor(server.url, "--tokenizer", tokenizer)
    lines = done.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("failed"))
    assert done.exit_code == 1
    assert lines[at].split()[1:3] == ["token", "details"]
    assert lines[at + 1].strip().startswith("fix: start vLLM with --enable-prompt-tokens-details")


def test_a_warning_passes(tokenizer: str) -> None:
    """The exit status is 0 where agentkv can do without what is missing."""
    with StubServer({Quirk.NO_SCALE_OUT}) as server:
        done = doctor(server.url, "--tokenizer", tokenizer)
    assert done.exit_code == 0
    assert "--enable-scale-out" in done.stdout


def test_json_holds_the_same_and_nothing_else(tokenizer: str) -> None:
    """The whole of standard output is one JSON object."""
    with StubServer({Quirk.NO_DETAILS}) as server:
        done = doctor(server.url, "--tokenizer", tokenizer, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert set(found) == {"url", "model", "checks", "ok"}
    assert (found["url"], found["model"], found["ok"]) == (server.url, MODEL, False)
    assert [check["name"] for check in found["checks"]] == [check.name for check in CHECKS]
    assert all(set(check) == {"name", "status", "needed", "found", "fix"} for check in found["checks"])
    failed = [check["name"] for check in found["checks"] if check["status"] == "failed"]
    assert failed == ["token details"]


def test_an_address_where_nothing_answers_is_one_line() -> None:
    """What was tried and what to do stand in it; the exit status is 1."""
    with StubServer() as server:
        url = server.url
    done = doctor(url)
    assert done.exit_code == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith("failed")
    assert url in line
    assert "is the server running" in line


def test_the_key_comes_from_the_environment_and_is_not_printed(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM_API_KEY by default, another variable if named; the key stands neither in lines nor in JSON."""
    with StubServer(api_key=KEY) as server:
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        good = doctor(server.url, "--tokenizer", tokenizer, "--json")
        monkeypatch.setenv("VLLM_API_KEY", "sk-wrong-key")
        bad = doctor(server.url)
        monkeypatch.setenv("OTHER_KEY", KEY)
        named = doctor(server.url, "--tokenizer", tokenizer, "--api-key-env", "OTHER_KEY")
    assert [done.exit_code for done in (good, bad, named)] == [0, 1, 0]
    assert KEY not in good.output + named.output
    assert "sk-wrong-key" not in bad.output
    assert "401" in bad.stdout


def test_headers_are_sent(tokenizer: str) -> None:
    """Each --header goes with every request, and its value is not printed."""
    words = ("--header", "X-Team: support", "--header", "X-Token:secret-token")
    with StubServer() as server:
        done = doctor(server.url, "--tokenizer", tokenizer, *words)
        sent = {(r.headers.get("X-Team"), r.headers.get("X-Token")) for r in server.requests}
    assert sent == {("support", "secret-token")}
    assert "secret-token" not in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "URL"),
        (("not-an-address",), "no address"),
        (("http://127.0.0.1:1", "--header", "no colon"), "Name: value"),
        (("http://127.0.0.1:1", "--api-key-env", "AGENTKV_NO_SUCH_KEY"), "AGENTKV_NO_SUCH_KEY"),
        (("http://127.0.0.1:1", "--timeout", "-1"), "--timeout"),
        (("http://127.0.0.1:1", "--ca-file", "/no/such/file"), "--ca-file"),
        (("http://127.0.0.1:1", "--insecure", "--ca-file", __file__), "--insecure"),
        (("http://127.0.0.1:1", "--nothing"), "--nothing"),
    ],
)
def test_bad_usage_is_status_2(words: tuple[str, ...], message: str) -> None:
    """Nothing is asked of a server, and what is wrong is named on standard error."""
    done = doctor(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_a_file_that_holds_no_certificates_is_bad_usage(tmp_path: Path) -> None:
    """The file is named, and nothing is printed on standard output."""
    file = tmp_path / "ca.pem"
    file.write_text("nothing", encoding="utf-8")
    done = doctor("https://127.0.0.1:1", "--ca-file", str(file))
    assert done.exit_code == 2
    assert "ca.pem" in done.stderr.replace("\n", "").replace("│", "").replace(" ", "")
    assert done.stdout == ""


def test_a_server_cannot_steer_the_terminal() -> None:
    """Control characters in a server's words are not printed."""
    with StubServer(api_key="\x1b[31mred") as server:
        done = doctor(server.url, "--header", "Authorization: Bearer \x1b[31m\u009bred")
    assert "\x1b" not in done.output
    assert "\x9b" not in done.output


def test_the_status_reaches_the_shell() -> None:
    """As a process of its own, the command ends with 1 where something needed failed."""
    with StubServer() as server:
        url = server.url
    done = subprocess.run(
        [sys.executable, "-m", "agentkv", "doctor", url, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == ""
    assert json.loads(done.stdout)["checks"][0]["status"] == "failed"


def test_the_page_names_every_option_and_check() -> None:
    """docs/doctor.md has a row for each."""
    page = (Path(__file__).parent.parent / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = {row.split("|")[1].strip().strip("*`") for row in page.splitlines() if row.startswith("| ")}
    command = get_command(app).commands["doctor"]  # type: ignore[attr-defined]  # a group has them
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    needed = {check.name for check in CHECKS if check.needed}
    assert (options | {check.name for check in CHECKS}) - rows == set()
    assert needed == set(re.findall(r"^\| \*\*(.+?)\*\* \|", page, re.MULTILINE))

"""The wheel is whole, holds nothing else, and works where the sources are not."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROBE = """
import json, sys
sys.path += json.loads(sys.argv[1])
import agentkv
from agentkv.cli.main import main
print(json.dumps({
    "file": agentkv.__file__,
    "version": agentkv.__version__,
    "missing": [name for name in agentkv.__all__ if not hasattr(agentkv, name)],
    "command": callable(main),
}))
"""


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout with the build backend that is installed here."""
    out = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    """Every path inside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but what the wheel holds."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    _run(*pip, "--disable-pip-version-check", "--target", target, wheel, cwd=target)
    return target


def _metadata(installed: Path) -> Message:
    (file,) = installed.glob("*.dist-info/METADATA")
    return message_from_bytes(file.read_bytes())


def _import_installed(installed: Path) -> dict[str, object]:
    """Import the wheel in an interpreter whose path knows its folder and the dependencies, not this checkout.

    ``-S`` keeps .pth files from being read, so an editable install of agentkv is out of sight.
    """
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    printed = _run(sys.executable, "-I", "-S", "-B", "-c", PROBE, json.dumps(paths), cwd=installed)
    seen: dict[str, object] = json.loads(printed)
    return seen


def test_wheel_holds_the_package_and_its_metadata_only(names: set[str]) -> None:
    """Tests, examples, benchmarks and documentation stay out of site-packages."""
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"agentkv"}
    assert len(tops) == 2


def test_wheel_holds_every_file_of_the_package(names: set[str]) -> None:
    """No module or data file of the package is left out by a build rule."""
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "agentkv").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources
    assert sources - names == set()


def test_wheel_is_typed_and_licensed(names: set[str]) -> None:
    """Type checkers find the marker, and the licence travels along."""
    assert "agentkv/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_metadata_says_what_the_package_is(installed: Path) -> None:
    """Name, licence expression, Python range and extras are those that were declared."""
    metadata = _metadata(installed)
    assert metadata["Name"] == "agentkv-middleware"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    assert set(metadata.get_all("Provides-Extra", [])) >= {"transformers", "langchain", "otel"}


def test_wheel_has_the_version_that_the_package_reports(installed: Path) -> None:
    """The version is written once, so the two cannot differ."""
    assert _metadata(installed)["Version"] == _import_installed(installed)["version"]


def test_installed_wheel_imports_without_the_sources(installed: Path) -> None:
    """Every public name can be had from the installed files alone."""
    seen = _import_installed(installed)
    assert Path(str(seen["file"])).is_relative_to(installed)
    assert seen["missing"] == []


def test_installed_wheel_brings_the_command(installed: Path) -> None:
    """The command `agentkv` is installed, and what it points at exists."""
    (file,) = installed.glob("*.dist-info/entry_points.txt")
    assert "agentkv = agentkv.cli.main:main" in file.read_text(encoding="utf-8")
    assert _import_installed(installed)["command"]

"""Where every part is required, a skipped test is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {
    "skipped in the test": "import pytest\ndef test_it(): pytest.skip('no part')\n",
    "skipped by a marker": "import pytest\n@pytest.mark.skip(reason='no part')\ndef test_it(): ...\n",
    "skipped by require": "from conftest import require\ndef test_it(): require(False, 'no part')\n",
    "a whole module": "import pytest\npytest.importorskip('no_such_package')\ndef test_it(): ...\n",
}

OPTIONAL = "import pytest\n@pytest.mark.optional('GPU')\ndef test_it(): pytest.skip('no GPU')\n"

EXPECTED_FAILURE = "import pytest\n@pytest.mark.xfail\ndef test_it(): raise ValueError\n"


def _run_pytest(folder: Path, source: str, *, require_all: bool) -> subprocess.CompletedProcess[str]:
    """Run one test file under this project's conftest, in a folder of its own."""
    conftest = Path(__file__).with_name("conftest.py").read_text(encoding="utf-8")
    (folder / "conftest.py").write_text(conftest, encoding="utf-8")
    (folder / "test_case.py").write_text(source, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    optional(reason): x\n", encoding="utf-8")
    environment = os.environ | {"AGENTKV_REQUIRE_ALL": "1" if require_all else "0", "CI": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_case.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("case", CASES)
def test_skip_fails_where_all_is_required(case: str, tmp_path: Path) -> None:
    """Every way to skip ends the run as failed."""
    done = _run_pytest(tmp_path, CASES[case], require_all=True)
    assert done.returncode in {pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED}, done.stdout
    assert "no part" in done.stdout or "no_such_package" in done.stdout


def test_skip_is_allowed_elsewhere(tmp_path: Path) -> None:
    """On a developer's machine a missing part skips its tests and the run succeeds."""
    done = _run_pytest(tmp_path, CASES["skipped by require"], require_all=False)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "1 skipped" in done.stdout


@pytest.mark.parametrize("source", [OPTIONAL, EXPECTED_FAILURE], ids=["optional", "xfail"])
def test_optional_and_expected_failures_stay_what_they_are(source: str, tmp_path: Path) -> None:
    """The marker `optional` and an expected failure are not taken for skips."""
    done = _run_pytest(tmp_path, source, require_all=True)
    assert done.returncode == pytest.ExitCode.OK, done.stdout

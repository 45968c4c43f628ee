"""What every test can ask for: the small model, and parts that may be missing.

Where ``AGENTKV_REQUIRE_ALL=1`` (as ``make test`` sets it) or ``CI=true``, nothing may be missing: a skipped
test fails, unless it carries ``@pytest.mark.optional(reason)``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from agentkv.backends import TransformersBackend

SMALL_MODEL = "smollm2-135m"
"""The name that `agentkv model pull` knows the small model by."""

_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)

settings.register_profile(
    "default", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "ci", parent=settings.get_profile("default"), derandomize=True, database=None, print_blob=True
)


def require_all() -> bool:
    """Tell whether a part that is missing is a failure and not a reason to skip."""
    return os.environ.get("AGENTKV_REQUIRE_ALL") == "1" or os.environ.get("CI") == "true"


settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if require_all() else "default"))


def require(condition: object, why: str) -> None:
    """Go on if `condition` holds; otherwise fail where everything is required, and skip elsewhere.

    Parameters
    ----------
    condition
        Anything with a truth value.
    why
        What is missing and how to get it.
    """
    if condition:
        return
    if require_all():
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def small_model_dir() -> Path:
    """Folder of the small model: ``AGENTKV_TEST_MODEL`` if set, otherwise the one that was pulled."""
    given = os.environ.get("AGENTKV_TEST_MODEL")
    if given:
        folder = Path(given)
        require((folder / "config.json").is_file(), f"AGENTKV_TEST_MODEL={given!r} has no config.json")
        return folder

    from agentkv import models
    from agentkv.errors import ModelNotFoundError

    found = None
    with contextlib.suppress(ModelNotFoundError):
        found = models.resolve(SMALL_MODEL)
    require(found, f"the small model is missing: run `make model` or `agentkv model pull {SMALL_MODEL}`")
    return Path(str(found))


@pytest.fixture(scope="session")
def small_backend(small_model_dir: Path) -> TransformersBackend:
    """The small model, loaded once for all tests that run it."""
    from agentkv.backends import TransformersBackend

    return TransformersBackend.from_pretrained(small_model_dir)


def _refuse_skip(report: _Report, reason: str) -> None:
    """Turn a report that says "skipped" into a failure that says why it may not be."""
    report.outcome = "failed"
    report.longrepr = f"{reason}\nA skip is a failure here, because every part of the project is required."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a skipped test where everything is required, unless it is marked optional."""
    report = yield
    expected_failure = hasattr(report, "wasxfail")
    optional = item.get_closest_marker("optional") is not None
    if report.skipped and require_all() and not expected_failure and not optional:
        _refuse_skip(report, f"skipped: {call.excinfo.value if call.excinfo else 'no reason given'}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that skips itself as a whole, such as by ``pytest.importorskip``."""
    report = yield
    if report.skipped and require_all():
        _refuse_skip(report, f"{collector.nodeid} skipped itself: {report.longrepr}")
    return report

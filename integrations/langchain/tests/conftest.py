"""The marker of tests that may be skipped where skips are failures."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "optional(reason): may be skipped even where skips are failures, without a database say"
    )

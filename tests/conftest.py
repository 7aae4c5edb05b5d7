"""What several test files need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Tests work out what they hold to, and leave nothing in the user's cache.
os.environ["WATTLINE_CACHE"] = "off"
# No test is timed: a first call may import what others find in memory.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of measurements and public data beside the checkout; a test that needs it skips without it."""
    folder = Path(os.environ.get("WATTLINE_SHARED", Path(__file__).parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"{folder} not found: set WATTLINE_SHARED to the folder of measurements and public data")
    return folder

"""The base of everything that wattline refuses to do."""

from __future__ import annotations


class WattlineError(Exception):
    """What is wrong, in one line that names the field, the value and what would be right."""

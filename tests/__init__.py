"""Tests are packages, so mirrored folders may repeat file names: `from tests.cases import ...`."""

HANGS = 900
"""Seconds after which something hangs, however slow the machine: no test is about its wall time."""

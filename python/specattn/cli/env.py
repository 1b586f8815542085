"""``specattn env``: what is installed, and what serves this machine."""

from __future__ import annotations

from specattn.cli.table import key_values
from specattn.cli.terminal import preload, write_line
from specattn.machine import facts


def env() -> None:
    """Print what to paste into an issue: versions, the machine, and which backends serve it."""
    preload("specattn.ops")
    for line in key_values(facts()):
        write_line(line)

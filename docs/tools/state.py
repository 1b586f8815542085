"""What ran, was tested and timed on which backend: `state.json` says it once, pages include it."""

from __future__ import annotations

import json
from pathlib import Path

from records import markdown, table

STATE = json.loads(Path(__file__).with_name("state.json").read_text())


@table("state")
def backends() -> str:
    """Return a line for each backend."""
    rows = STATE["backends"]
    return markdown(rows[0], (row.values() for row in rows))


@table("state-since")
def since() -> str:
    """Return what changed since kernels and decode layer ran on a GPU, as a list."""
    return "\n".join(f"* {item};" for item in STATE["since the H100"])[:-1] + "."

"""Reads bench/results, and keeps the functions that write tables from it, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench/results"
TABLES: dict[str, Callable[[], str]] = {}


def read(path: str, *kinds: str) -> list[dict[str, Any]]:
    """Return a file's records of these kinds (``row``), each with the heading of its run."""
    run: dict[str, Any] = {}
    found = []
    for line in (RESULTS / path).read_text().splitlines():
        record = json.loads(line)
        if record.get("kind") == "run":
            run = record
        elif record.get("kind") in (kinds or ("row",)):
            found.append(record | {"run": run})
    return found


def table(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register the function that writes this table."""

    def register(write: Callable[[], str]) -> Callable[[], str]:
        TABLES[name] = write
        return write

    return register


def markdown(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a table; ``None`` is a dash."""
    lines = [list(header), ["---"] * len(list(header))]
    lines += [["-" if cell is None else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def size(tokens: int) -> str:
    """Return a number of tokens as people write it."""
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens or "-")


def spread(timed: dict[str, float], digits: int = 0) -> str:
    """Return a median with the distance between its quartiles."""
    return f"{timed['median']:.{digits}f} ±{timed['spread']:.0%}"


def label(row: dict[str, Any]) -> str:
    """Return a method with its options."""
    options = ",".join(f"{name}={value}" for name, value in row["settings"].items())
    return row["method"] + (f":{options}" if options else "")

"""Show rows as a table and keep them as JSON Lines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TextIO

from .bar import Bar
from .ceilings import Ceilings
from .measure import WRONG, Row

SCHEMA = 2
HEADER = (
    "primitive",
    "variant",
    "shape",
    "B",
    "context",
    "T",
    "time",
    "±",
    "GB/s",
    "of ceiling",
    "bound by",
    "best peer",
    "its time",
    "speedup",
    "error",
)
SPARSE = ("sparse_gather_attention", "select_topk")
LEFT_ALIGNED = {"primitive", "variant", "shape", "bound by", "best peer"}


def write_line(file: TextIO | None, record: dict) -> None:
    """Append one JSON line at once: an interrupted sweep keeps its finished rows."""
    if file is not None:
        # Python would write inf as a word that is no JSON; a missing figure is null.
        finite = {
            k: None if isinstance(v, float) and math.isinf(v) else v for k, v in record.items()
        }
        file.write(json.dumps(finite, allow_nan=False) + "\n")
        file.flush()


def run_record(
    machine: dict, backend: str, ceilings: Ceilings, missing: dict[str, str] | None = None
) -> dict:
    """Return the first line of a file: what all rows after it were measured on."""
    return {
        "kind": "run",
        "schema": SCHEMA,
        **machine,
        "backend": backend,
        "ceilings": ceilings.as_json(),
        "missing": missing or {},
    }


def row_record(row: Row) -> dict:
    """Return one row for JSON; times in seconds, bandwidth in bytes per second."""
    case = row.case
    return {
        "kind": "row",
        "op": case.op,
        "variant": case.variant,
        "shape": case.shape.name,
        "dtype": case.dtype,
        "batch": case.batch,
        "context": case.context,
        "rows": case.rows,
        "page_size": case.page_size,
        "sparsity": case.sparsity if case.op in SPARSE else None,
        "fault": row.fault,
        "error": row.error if math.isfinite(row.error) else None,
        "bytes_read": row.cost.read,
        "bytes_written": row.cost.written,
        "operations": row.cost.operations,
        "time": asdict(row.ours) if row.ours else None,
        "bandwidth": row.bandwidth,
        "ceiling": row.ceiling,
        "bounds": row.bounds or None,
        "bound": row.bound,
        "share": row.share,
        "peers": {
            name: {**asdict(timing), "ratio": row.ratios[name]}
            for name, timing in row.peers.items()
        },
        "refused": row.refused,
        "others": row.others,
    }


def bar(line: Bar, *, disturbed: bool) -> None:
    """Print one bar as soon as it is measured: what was asked, found, and by how much it moved."""
    show = {
        "share": lambda x: f"{x:.1%}",
        "over": lambda x: f"{x:+.1%}",
        "times": lambda x: f"{x:.2f}x",
        "us": lambda x: f"{x:.1f} us",
    }[line.unit]
    limit = ("at most " if line.at_most else "") + show(line.target).lstrip("+")
    found = "-" if line.measured is None else show(line.measured)
    verdict = "met" if line.met else "MISSED"
    note = line.note + "  (others used the machine)" * disturbed
    print(
        f"{verdict:7}{line.name:82}{limit:>14}{found:>9}  ±{line.spread:4.0%}  {note}",
        flush=True,
    )


def table(rows: Sequence[Row]) -> None:
    """Print the rows; with plain spaces where ``rich`` is not installed."""
    lines = [_cells(row) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _plain(lines)
        return
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in HEADER:
        grid.add_column(name, justify="left" if name in LEFT_ALIGNED else "right", no_wrap=True)
    for row, line in zip(rows, lines, strict=True):
        grid.add_row(*line, style="bold red" if row.fault else None)
    # Wider than any row: a narrow terminal shall break lines rather than lose figures.
    Console(width=200).print(grid)


@contextmanager
def progress(total: int) -> Iterator:
    """Yield a function that shows which row is being measured, on standard error."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        done = iter(range(1, total + 1))
        yield lambda name: print(f"{next(done)}/{total} {name}", file=sys.stderr, flush=True)
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        bar.advance(task, -1)
        yield lambda name: bar.update(task, advance=1, description=name)


def _cells(row: Row) -> tuple[str, ...]:
    case = row.case
    sparse = f" {case.sparsity:.0%}" if case.op in SPARSE else ""
    dtype = "" if case.dtype == "bf16" else f" {case.dtype}"
    name = (
        case.op,
        case.variant + sparse,
        case.shape.name + dtype,
        str(case.batch),
        f"{case.context // 1024}k" if case.context >= 1024 else str(case.context or "-"),
        str(case.rows),
    )
    if row.ours is None:
        return (*name, WRONG if row.fault == WRONG else "FAILED", *[""] * 7, f"{row.error:.0e}")
    figures = (
        _time(row.ours.median),
        f"{row.ours.spread:.0%}",
        f"{row.bandwidth / 1e9:.1f}",
        f"{row.share:.1%}",
        str(row.bound),
    )
    best = row.best_peer
    peer = ("none", "", "") if best is None else (best, _time(row.peers[best].median))
    if best is not None:
        peer = (*peer, f"{row.ratios[best]:.2f}x")
    return (*name, *figures, *peer, f"{row.error:.0e}")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _plain(lines: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(HEADER, *lines, strict=True)]
    for line in (HEADER, *lines):
        cells = (
            cell.ljust(width) if name in LEFT_ALIGNED else cell.rjust(width)
            for name, cell, width in zip(HEADER, line, widths, strict=True)
        )
        print("  ".join(cells).rstrip())

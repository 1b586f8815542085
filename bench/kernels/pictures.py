"""Draw a result file: the roofline, and per primitive time against context."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import pictures
from common.records import Record

from .report import best_peer

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b4c9a", "#555555")
GREY = "#333333"


def draw(run: Record, rows: Sequence[Record], folder: Path) -> list[Path]:
    """Return the files written, `roofline.png` and `context.png`; raises as `pictures.draw`."""
    right = [row for row in rows if row["time"]]
    title = f"{run['machine']['name']}, commit {run['commit']}, {run['time'][:10]}"
    roofline = [("roofline", lambda axes: _roofline(axes, run, right))] * bool(right)
    best = f"{title}\nfull: specattn, dashed: the best peer"
    return [
        *pictures.draw(roofline, folder / "roofline.png", title, size=(9, 5.5)),
        *pictures.draw(_contexts(right), folder / "context.png", best, columns=3),
    ]


def _roofline(axes: Any, run: Record, rows: Sequence[Record]) -> None:
    """Draw one mark per row, its best peer on the same vertical, and what the machine allows."""
    colors, hollow = _colors(row["op"] for row in rows), {"marker": "o", "facecolors": "none"}
    seen = set()
    for row in filter(lambda row: row["operations"], rows):  # a copy has no place on a roofline
        operations, color = row["operations"], colors[row["op"]]
        density = operations / (row["bytes_read"] + row["bytes_written"])
        rate = operations / row["time"]["median"]
        label = None if row["op"] in seen else row["op"]
        seen.add(row["op"])
        if best := best_peer(row):
            slower = operations / best[1]["median"]
            axes.plot([density, density], [slower, rate], color=color, linewidth=0.7, alpha=0.6)
            axes.scatter(density, slower, edgecolors=color, s=26, **hollow)
        axes.scatter(density, rate, marker="o", color=color, s=34, label=label, zorder=3)
    axes.scatter([], [], edgecolors=GREY, label="its best peer", **hollow)
    _ceilings(axes, run["ceilings"], {row["dtype"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="operations per byte that the task needs")
    axes.set(ylabel="operations per second")


def _ceilings(axes: Any, ceilings: dict, dtypes: set[str]) -> None:
    """Draw the memory's slope up to each matrix rate, and that rate."""
    left, right = axes.get_xlim()
    left, slope = max(left, 0.05), ceilings["bandwidth"]
    for dtype in sorted(dtypes):
        rate = ceilings["matrix"][dtype]
        knee = rate / slope
        axes.plot([knee, max(right, 4 * knee)], [rate, rate], color=GREY, linewidth=1.2)
        axes.annotate(f"{dtype} products {rate / 1e12:.2f} TFLOP/s", (knee, rate * 1.1), fontsize=8)
    top = max(ceilings["matrix"][dtype] for dtype in dtypes)
    memory = f"memory {slope / 1e9:.1f} GB/s"
    axes.plot([left, top / slope], [left * slope, top], color=GREY, linewidth=1.2, label=memory)


def _contexts(rows: Sequence[Record]) -> list[pictures.Panel]:
    """Return a panel per primitive that reads a cache."""
    of_op: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    several_shapes = len({row["shape"] for row in rows}) > 1
    for row in sorted(rows, key=lambda row: row["context"]):
        if row["context"]:
            of_op[row["op"]][_series(row, several_shapes)].append(row)
    return [(op, partial(_times, series)) for op, series in of_op.items()]


def _times(series: dict[str, list[Record]], axes: Any) -> None:
    """Draw ours in full lines, the best peer dashed."""
    colors = _colors(series)
    for name, rows in series.items():
        ours = [(row["context"], row["time"]["median"] * 1e3) for row in rows]
        axes.plot(*zip(*ours, strict=True), "o-", color=colors[name], label=name, markersize=4)
        peers = [(row["context"], best_peer(row)) for row in rows]
        best = [(context, 1e3 * peer[1]["median"]) for context, peer in peers if peer]
        if best:
            axes.plot(*zip(*best, strict=True), "o--", color=colors[name], markersize=3, mfc="w")
    pictures.logarithmic(axes, sorted({row["context"] for x in series.values() for row in x}))
    axes.set(xlabel="cached tokens", ylabel="ms")


def _series(row: dict, several_shapes: bool) -> str:
    sparse = f" {row['sparsity']:.0%}" if row.get("sparsity") else ""
    shape = f"{row['shape']}, " if several_shapes else ""
    batch = f", B={row['batch']}" if row["batch"] > 1 else ""
    dtype = "" if row["dtype"] == "bf16" else f", {row['dtype']}"
    return f"{shape}{row['variant']}{sparse}, {row['rows']} rows{batch}{dtype}"


def _colors(names: Iterable[str]) -> dict[str, str]:
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(dict.fromkeys(names))}

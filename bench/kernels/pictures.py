"""Draw a result file: the roofline, and per primitive time against context."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b4c9a", "#555555")


def draw(run: dict, rows: list[dict], folder: Path) -> list[Path]:
    """Write `roofline.png` and `context.png`; return what was written.

    Raises ImportError where matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    right = [row for row in rows if row["time"]]
    if not right:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{run['machine']['name']}, commit {run['commit']}, {run['time'][:10]}"
    return [
        _roofline(run, right, title, folder / "roofline.png"),
        _context(right, title, folder / "context.png"),
    ]


def _roofline(run: dict, rows: list[dict], title: str, path: Path) -> Path:
    """Operations per byte against operations per second; one mark per row, best peer beside."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    colors = _colors(row["op"] for row in rows)
    seen = set()
    for row in rows:
        operations = row["operations"]
        density = operations / (row["bytes_read"] + row["bytes_written"])
        rate = operations / row["time"]["median"]
        color = colors[row["op"]]
        label = None if row["op"] in seen else row["op"]
        seen.add(row["op"])
        if best := _best_peer(row):
            slower = operations / best["median"]
            axes.plot([density, density], [slower, rate], color=color, linewidth=0.7, alpha=0.6)
            axes.scatter(density, slower, marker="o", facecolors="none", edgecolors=color, s=26)
        axes.scatter(density, rate, marker="o", color=color, s=34, label=label, zorder=3)
    axes.scatter([], [], marker="o", facecolors="none", edgecolors="#333333", label="its best peer")
    _ceilings(axes, run["ceilings"], {row["dtype"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="operations per byte that the task needs")
    axes.set(ylabel="operations per second", title=title)
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _ceilings(axes, ceilings: dict, dtypes: set[str]) -> None:
    """Draw the memory's slope up to each matrix rate, and that rate."""
    left, right = axes.get_xlim()
    left = max(left, 0.05)
    for dtype in sorted(dtypes):
        rate = ceilings["matrix"][dtype]
        knee = rate / ceilings["bandwidth"]
        axes.plot([knee, max(right, 4 * knee)], [rate, rate], color="#333333", linewidth=1.2)
        axes.annotate(f"{dtype} products {rate / 1e12:.2f} TFLOP/s", (knee, rate * 1.1), fontsize=8)
    top = max(ceilings["matrix"][dtype] for dtype in dtypes) / ceilings["bandwidth"]
    axes.plot(
        [left, top],
        [left * ceilings["bandwidth"], top * ceilings["bandwidth"]],
        color="#333333",
        linewidth=1.2,
        label=f"memory {ceilings['bandwidth'] / 1e9:.1f} GB/s",
    )


def _context(rows: list[dict], title: str, path: Path) -> Path:
    """One panel per primitive that reads a cache: ours in full lines, the best peer dashed."""
    from matplotlib import pyplot

    panels: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    several_shapes = len({row["shape"] for row in rows}) > 1
    for row in rows:
        if row["context"]:
            panels[row["op"]][_series(row, several_shapes)].append(row)
    columns = min(3, max(1, len(panels)))
    lines = -(-max(1, len(panels)) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(4.6 * columns, 3.6 * lines), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (op, series) in zip(grid.flat, panels.items(), strict=False):
        colors = _colors(series)
        for name, points in series.items():
            points.sort(key=lambda row: row["context"])
            contexts = [row["context"] for row in points]
            ours = [row["time"]["median"] * 1e3 for row in points]
            axes.plot(contexts, ours, "o-", color=colors[name], label=name, markersize=4)
            best = [(row["context"], _best_peer(row)) for row in points]
            best = [(context, 1e3 * peer["median"]) for context, peer in best if peer]
            if best:
                axes.plot(
                    *zip(*best, strict=True), "o--", color=colors[name], markersize=3, mfc="w"
                )
        axes.set(xscale="log", yscale="log", title=op, xlabel="cached tokens", ylabel="ms")
        ticks = sorted({row["context"] for points in series.values() for row in points})
        axes.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
        axes.set_xticks([], minor=True)
        axes.legend(fontsize=6)
        axes.grid(alpha=0.25)
    figure.suptitle(f"{title}\nfull: specattn, dashed: the best peer", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _series(row: dict, several_shapes: bool) -> str:
    sparse = f" {row['sparsity']:.0%}" if row.get("sparsity") else ""
    shape = f"{row['shape']}, " if several_shapes else ""
    batch = f", B={row['batch']}" if row["batch"] > 1 else ""
    dtype = "" if row["dtype"] == "bf16" else f", {row['dtype']}"
    return f"{shape}{row['variant']}{sparse}, T={row['rows']}{batch}{dtype}"


def _best_peer(row: dict) -> dict | None:
    return min(row["peers"].values(), key=lambda peer: peer["median"], default=None)


def _colors(names) -> dict[str, str]:
    ordered = list(dict.fromkeys(names))
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(ordered)}

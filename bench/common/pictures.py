"""Panels side by side in one PNG, each with its legend below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .tables import size

Panel = tuple[str, Callable[[Any], None]]
"""A title, and what draws on the axes of matplotlib."""


def draw(
    panels: Sequence[Panel],
    path: Path,
    title: str | None = None,
    *,
    color: str = "black",
    columns: int = 0,
    size: tuple[float, float] = (4.5, 3.6),
) -> list[Path]:
    """Draw panels, `columns` in a line; return the file. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if not panels:
        return []
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = min(columns or len(panels), len(panels))
    lines = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(
        lines,
        columns,
        figsize=(size[0] * columns, size[1] * lines),
        squeeze=False,
        layout="constrained",
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, fill) in zip(grid.flat, panels, strict=False):
        axes.set_title(name, fontsize=9)
        fill(axes)
        axes.grid(alpha=0.3)
    _add_legends(figure, grid)
    if title:
        figure.suptitle(title, color=color, fontsize=10)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return [path]


def logarithmic(axes: Any, contexts: Sequence[int]) -> None:
    """Draw both axes as logarithms, with a tick for each context and plain figures."""
    from matplotlib import ticker

    axes.set(xscale="log", yscale="log")
    axes.set_xticks(contexts, [size(n) for n in contexts])
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def _add_legends(figure: Any, grid: Any) -> None:
    """Put a legend below every panel; the figure grows by its lines, so that panels stay wide."""
    for line in grid:
        names = [axes.get_legend_handles_labels()[1] for axes in line if axes.get_visible()]
        columns = 1 if max((len(one) for own in names for one in own), default=0) > 28 else 2
        most = max(-(-len(own) // columns) for own in names)
        figure.set_figheight(figure.get_figheight() + 0.16 * max(0, most - 3))
        for axes, own in zip(line, names, strict=False):
            if own:
                place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
                axes.legend(fontsize=7, ncols=columns, **place)

"""Draw the figures of docs/how: ``python docs/tools/figures.py``. The same bits every time."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, Rectangle

FOLDER = Path(__file__).parents[1] / "figures"
BLUE, ORANGE, GREEN, GREY, PALE = "#3b6fb6", "#e08a2c", "#3f9b57", "#8a8f98", "#eceef2"
PARENTS = (-1, 0, 0, 1, 1, 2)
PLACES = ((2.0, 2), (1.0, 1), (3.0, 1), (0.5, 0), (1.5, 0), (3.0, 0))


def main():
    """Draw all figures into docs/figures."""
    pyplot.rcParams |= {"font.size": 10, "svg.hashsalt": "specattn", "font.family": "DejaVu Sans"}
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw()
        save(figure, name)


def save(figure, name):
    """Write a figure as SVG without the date, so that drawing it again changes nothing."""
    figure.savefig(FOLDER / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def tree_mask():
    """Draw a tree, and which keys each of its rows sees."""
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 3.4), gridspec_kw={"width_ratios": (1, 1.9)}
    )
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            left.plot(*zip(PLACES[parent], PLACES[node], strict=True), color=GREY, zorder=1)
    for node, (x, y) in enumerate(PLACES):
        color = GREEN if node == 0 else BLUE
        left.scatter(x, y, s=420, color=color, zorder=2)
        left.text(x, y, str(node), color="white", ha="center", va="center")
    left.set(xlim=(0, 3.5), ylim=(-0.5, 2.5), title="parents = [-1, 0, 0, 1, 1, 2]")

    cached = 7
    for row in range(len(PARENTS)):
        path = ancestors(row)
        for column in range(cached):
            square(right, column, -row, PALE)
        for key in range(len(PARENTS)):
            square(right, cached + 0.6 + key, -row, BLUE if key in path else "white")
        right.text(-0.3, -row + 0.5, f"row {row}", ha="right", va="center")
    for key in range(len(PARENTS)):
        right.text(cached + 1.1 + key, 1.25, str(key), ha="center")
    right.text(cached / 2, 1.25, "cached prefix: no mask", ha="center")
    word = sum(1 << key for key in ancestors(4))
    right.text(cached + 0.6 + len(PARENTS) + 0.3, -4 + 0.5, f"= 0b{word:06b} = {word}", va="center")
    right.set(xlim=(-2, 18.4), ylim=(-5.2, 1.9))
    return bare(figure, left, right)


def ancestors(node):
    """Return a node with all nodes above it."""
    path = set()
    while node >= 0:
        path.add(node)
        node = PARENTS[node]
    return path


def split_and_merge():
    """Draw a cache cut into splits, the states they give, and their merge."""
    figure, axes = pyplot.subplots(figsize=(9, 3.6))
    pieces = [("keys 0 .. 4095", 0), ("4096 .. 8191", 3), ("8192 .. 10239", 6), ("the tree", 9)]
    for number, (name, x) in enumerate(pieces):
        color = ORANGE if number == 3 else BLUE
        axes.add_patch(Rectangle((x, 4), 2.8, 0.8, color=color, alpha=0.85))
        axes.text(x + 1.4, 4.4, name, color="white", ha="center", va="center")
        arrow(axes, (x + 1.4, 3.95), (x + 1.4, 3.25))
        axes.text(x + 1.4, 2.95, f"(out$_{number}$, lse$_{number}$)", ha="center", va="center")
        arrow(axes, (x + 1.4, 2.7), (5.9 + (x - 4.5) * 0.18, 1.85))
    axes.add_patch(Rectangle((3.1, 0.95), 5.6, 0.85, color=GREEN, alpha=0.9))
    axes.text(5.9, 1.37, "combine", color="white", ha="center", va="center")
    axes.text(
        5.9,
        0.35,
        r"lse $= \log\,\sum_i e^{\mathrm{lse}_i}$        "
        r"out $= \sum_i e^{\mathrm{lse}_i - \mathrm{lse}}$ out$_i$",
        ha="center",
    )
    axes.text(-0.1, 4.4, "KV cache", ha="right", va="center")
    axes.text(-0.1, 2.95, "one program\neach", ha="right", va="center")
    axes.set(xlim=(-2, 12), ylim=(0, 5))
    return bare(figure, axes)


def collecting_scores():
    """Draw the logits of a verification, and the row of means that ranks the cache."""
    figure, axes = pyplot.subplots(figsize=(9, 3.7))
    keys, rows = 16, 5
    heat = [abs((key * 37 + 11) % 16 - 7.5) / 8 for key in range(keys)]
    best = sorted(range(keys), key=heat.__getitem__)[-4:]
    for row in range(rows):
        collected = row in (0, rows - 1)
        for key in range(keys):
            square(axes, key, 5 - row, BLUE if collected else PALE, 0.25 + 0.6 * heat[key])
        name = f"row {row}" + (", collected" if collected else "")
        axes.text(-0.3, 5.5 - row, name, ha="right", va="center")
    for key in range(keys):
        square(axes, key, -0.6, ORANGE, 0.15 + 0.8 * heat[key])
        if key in best:
            axes.add_patch(
                Rectangle((key, -0.6), 1, 1, fill=False, edgecolor="black", linewidth=2, zorder=3)
            )
            arrow(axes, (key + 0.5, -0.7), (key + 0.5, -1.5))
    axes.text(-0.3, -0.1, "one more row:\nthe mean query", ha="right", va="center")
    axes.text(keys + 0.3, -0.1, "= mean logit of\neach cached key", va="center")
    axes.text(keys + 0.3, 3.5, "attention: softmax and\nvalues, nothing stored", va="center")
    axes.text(keys / 2, -2.1, "select_topk: what the next draft reads", ha="center")
    axes.set(xlim=(-5, 22), ylim=(-2.5, 6.3))
    return bare(figure, axes)


def gathering():
    """Draw a list of positions that is read in place, through pages and without."""
    figure, axes = pyplot.subplots(figsize=(9, 3.8))
    picked = (1, 2, 6, 9, 11, 14)
    pages = {0: 2, 1: 0, 2: 3, 3: 1}
    for position in range(16):
        chosen = position in picked
        square(axes, position, 5, BLUE if chosen else PALE)
        axes.text(
            position + 0.5, 5.5, position, ha="center", va="center",
            color="white" if chosen else GREY,
        )  # fmt: skip
    axes.text(-0.3, 5.5, "text", ha="right", va="center")
    for place in range(16):
        logical = next(page for page, physical in pages.items() if physical == place // 4)
        position = 4 * logical + place % 4
        square(axes, place + 0.5 * (place // 4), 1, BLUE if position in picked else PALE)
        axes.text(
            place + 0.5 * (place // 4) + 0.5, 1.5, position, ha="center", va="center",
            color="white" if position in picked else GREY,
        )  # fmt: skip
    axes.text(-0.3, 1.5, "pages in memory", ha="right", va="center")
    for position in picked:
        place = 4 * pages[position // 4] + position % 4
        arrow(axes, (position + 0.5, 4.9), (place + 0.5 * (place // 4) + 0.5, 2.1))
    axes.text(18.2, 5.5, f"indices = {list(picked)}", va="center")
    axes.text(18.2, 3.5, f"block_table = {[pages[n] for n in range(4)]}", va="center")
    axes.text(18.2, 1.5, "K and V are read where\nthey lie: nothing is copied", va="center")
    axes.set(xlim=(-5, 27), ylim=(0.6, 6.4))
    return bare(figure, axes)


def square(axes, x, y, color, alpha=1.0):
    """Draw a cell of a matrix."""
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, alpha=alpha, edgecolor="white"))


def arrow(axes, start, end):
    """Draw an arrow between two points of the axes."""
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=GREY, zorder=0)
    )


def bare(figure, *all_axes):
    """Return a figure whose axes show nothing but what was drawn."""
    for axes in all_axes:
        axes.axis("off")
    return figure


FIGURES = {
    "tree-mask": tree_mask,
    "split-and-merge": split_and_merge,
    "collecting-scores": collecting_scores,
    "gathering": gathering,
}

if __name__ == "__main__":
    main()

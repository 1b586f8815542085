"""Draws the losses of a training run, all that the trainer logged, by step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def draw_losses(history: Iterable[dict[str, Any]], path: Path) -> None:
    """Write a PNG of the losses in the trainer's ``log_history``: lines in training, dots held out.

    Raises ImportError where matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {}
    for entry in history:
        for name in filter(_is_loss, entry):
            curves.setdefault(name, []).append((entry["step"], entry[name]))
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    trained = (name for name in curves if not name.startswith("eval_"))
    colours = {name: f"C{n}" for n, name in enumerate(trained)}
    for name, points in curves.items():
        held_out = name.startswith("eval_")
        label = name.removeprefix("eval_").replace("_", " ") + held_out * ", held out"
        colour = colours.get(name.removeprefix("eval_"), "black")
        axes.plot(*zip(*points, strict=True), "o" if held_out else "-", color=colour, label=label)
    axes.set(xlabel="step", ylabel="loss (of tokens in nats)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _is_loss(name: str) -> bool:
    return "loss" in name.split("_") and name != "train_loss"  # which is the mean of the whole run

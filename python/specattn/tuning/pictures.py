"""Draws a tuner's measurements like the paper's figures 8 and 13."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specattn.tuning.record import Record
from specattn.tuning.vegas import STEPS, Candidate, result_of


def draw(record: Record, folder: Path) -> list[Path]:
    """Write ``figure-8.png`` and ``figure-13.png``; return the files.

    Figure 8: drafted tokens accepted per round over the share of the cache, with many drafted.
    Figure 13: decoding throughput over drafted tokens, and over the share, as multiples of plain
    decoding's in the same turn: a machine's own pace changes more than these settings do. Raises
    ImportError where matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    folder.mkdir(parents=True, exist_ok=True)
    steps = {step: _results(record, step) for step in STEPS}
    least = record.heading["sweep"]["min_tokens"] / record.heading["prompts"]["context"]

    def figure(panels: int) -> tuple[Any, Any]:
        figure = Figure(figsize=(4.8 * panels, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(f"{Path(record.heading['model']['path']).name}, {_setting(record)}")
        return figure, figure.subplots(1, panels, squeeze=False)[0]

    def plot(
        panel: Any, over: str, points: dict[Candidate, float], label: str, chosen: Any
    ) -> None:
        shown = {  # a share is at least what `min_tokens` makes it
            one: one.gamma if over == "gamma" else max(one.ratio, least) for one in points
        }
        line = sorted((shown[one], points[one]) for one in points)
        panel.plot(*zip(*line, strict=True), "o-", label=label)
        panel.plot(shown[chosen], points[chosen], "o", ms=12, mfc="none", mec="C3", label="taken")

    eight, (axes,) = figure(1)
    points = {one: result.accepted for one, result in steps["ratio"].items()}
    gamma = next(iter(points)).gamma
    assert record.chosen is not None, "the steps are taken"
    taken = Candidate(gamma, record.chosen["stable_ratio"])
    plot(axes, "ratio", points, f"gamma {gamma}", taken)
    axes.set(xlabel="share of the cache", ylabel="accepted drafted tokens per round")

    thirteen, (left, right) = figure(2)
    for step, panel, name, fixed, label in (
        ("gamma", left, "gamma", "ratio", "drafted tokens (gamma)"),
        ("ratio again", right, "ratio", "gamma", "share of the cache"),
    ):
        points = {one: found.speedup for one, found in steps[step].items() if one.gamma}
        value = getattr(next(iter(points)), fixed)
        taken = max(points, key=points.__getitem__)
        plot(panel, name, points, f"Vegas, {fixed} {value:g}", taken)
        panel.axhline(1, color="black", ls="--", label="plain")
        panel.set(xlabel=label, ylabel="throughput, times plain decoding's")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))

    files = []
    for picture, panels, name in (
        (eight, [axes], "figure-8.png"),
        (thirteen, [left, right], "figure-13.png"),
    ):
        for panel in panels:
            panel.margins(y=0.12)
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
        files.append(folder / name)
        picture.savefig(files[-1], dpi=110)
    return files


def _results(record: Record, step: str) -> dict[Candidate, Any]:
    own = [one for one in record.measurements if one["step"] == step]
    candidates = dict.fromkeys(Candidate(one["gamma"], one["ratio"]) for one in own)
    return {one: result_of(record.measurements, step, one) for one in candidates}


def _setting(record: Record) -> str:
    sweep = record.heading["sweep"]
    context = record.heading["prompts"]["context"]
    return f"{context} tokens, batch {sweep['batch']}, temperature {sweep['temperature']:g}"

"""Predictions beside what was measured, with their error."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specattn.ops.cost import Cost

from .machines import Machine, calibrating, packed_rows, read_results
from .models import MODELS
from .passes import Setting, pass_time, select_time
from .rounds import (
    MIN_TOKENS,
    RATIO,
    Round,
    longspec_round,
    plain_round,
    poss_round,
    tokenswift_round,
    vegas_round,
)

_ROUNDS: dict[str, tuple[Callable[..., Round], tuple[str, ...]]] = {
    "plain": (plain_round, ()),
    "vegas": (vegas_round, ("gamma", "ratio", "min_tokens")),
    "longspec": (longspec_round, ("widths",)),
    "tokenswift": (tokenswift_round, ("widths", "k", "n", "budget")),
    "poss": (poss_round, ("depth", "total_tokens", "width", "window")),
}
"""By method, its round and the options of a row that it takes."""
_PLANNED = ("plain step", "verify", "verify, scores", "select", "draft step")


@dataclass(frozen=True)
class Check:
    """One measured figure and its prediction, both in `unit`."""

    name: str
    unit: str
    predicted: float
    measured: float
    calibrated: bool = False  # the prediction was made from this very figure

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return self.predicted / self.measured - 1


def checks(path: Path, machine: Machine) -> list[Check]:
    """Predict every row of a result file that the model covers.

    The host's time per layer cannot be known from kernels. It is taken from the file itself: for
    passes from the plain step at the shortest context, for decoded rows from plain decoding there
    (passes start from cold caches, a loop does not). Those rows are marked as calibrated.

    Parameters
    ----------
    path : Path
        JSON Lines of ``bench/run_kernels.py`` or ``bench/run_decoding.py``.
    machine : Machine

    Returns
    -------
    list of Check

    Raises
    ------
    ValueError
        The file is missing or is no result of a benchmark.
    """
    run, records = read_results(path)
    own = machine.results is not None and machine.results.resolve() == path.resolve()
    rows = [row for row in records if row["kind"] == "row"]
    found = list(_kernels([row for row in rows if "op" in row], machine, own))
    settings = _Settings(run.get("model") or {}, machine)
    passes = [row for row in records if row["kind"] == "pass" and _shape(row) in MODELS]
    rounds = [row for row in rows if row.get("method") in _ROUNDS and _shape(row) in MODELS]
    found += _passes(passes, settings)
    found += _rounds([row for row in rounds if not row["fault"]], settings)
    return found


@dataclass(frozen=True)
class _Settings:
    """What all rows of a file of decoding share."""

    model: dict
    machine: Machine

    def of(self, row: dict, layer_seconds: float) -> Setting:
        """Return the setting that a row was measured in."""
        shape = MODELS[_shape(row)]
        shape = replace(shape, layers=self.model.get("layers", shape.layers))
        size = 4 if self.model.get("dtype") == "float32" else 2
        host = self.machine.with_layer_seconds(layer_seconds)
        return Setting(shape, host, row["context"], batch=row.get("batch", 1), size=size)


def _shape(row: dict) -> str:
    """Return whose shape a row's model has; it may be cut to fewer layers."""
    return row["model"].partition(" cut to ")[0]


def errors(found: Sequence[Check]) -> tuple[float, float]:
    """Return the median and the largest absolute error of what was not calibrated."""
    sizes = [abs(one.error) for one in found if not one.calibrated]
    return (statistics.median(sizes), max(sizes)) if sizes else (0.0, 0.0)


def _kernels(rows: list[dict], machine: Machine, own: bool) -> Iterator[Check]:
    """Predict every row of a primitive that has a share; `own` rows may have calibrated it."""
    for row in rows:
        op = "hybrid_tree_attention" if row["op"] == "verify_attention" else row["op"]
        if not row["time"] or op not in machine.shares or row["dtype"] == "fp32":
            continue
        cost = Cost(row["bytes_read"], row["bytes_written"], row["operations"])
        packed = packed_rows(row)
        predicted = machine.seconds(op, packed, cost.bytes, cost.operations)
        predicted += machine.cold_seconds
        known = own and op == row["op"] and row in calibrating(row["op"], rows)
        name = f"{row['op']} {row['variant']}, {row['shape']}, {row['context']} tokens"
        yield Check(
            f"{name}, T={row['rows']}", "ms", 1e3 * predicted, 1e3 * row["time"]["median"], known
        )


def _passes(rows: list[dict], settings: _Settings) -> list[Check]:
    rows = [row for row in rows if row["name"] in _PLANNED]
    steps = [row for row in rows if row["name"] == "plain step"]
    if not steps:
        return []
    first = min(steps, key=lambda row: row["context"])
    setting = settings.of(first, 0.0)
    left = first["time"]["median"] - pass_time(setting, 1).total
    host = max(0.0, left) / setting.model.layers
    found = []
    for row in rows:
        setting = settings.of(row, host)
        selected = max(MIN_TOKENS, round(RATIO * row["context"]))
        if row["name"] == "select":
            predicted = select_time(setting, selected) + settings.machine.cold_seconds
        else:
            predicted = pass_time(
                setting,
                row["rows"],
                selected=selected if row["name"] == "draft step" else None,
                collect=row["name"] == "verify, scores",
            ).total
        name = f"{row['name']}, {row['model']}, {row['context']} tokens"
        measured = 1e3 * row["time"]["median"]
        found.append(Check(name, "ms", 1e3 * predicted, measured, row is first))
    return found


def _rounds(rows: list[dict], settings: _Settings) -> list[Check]:
    """Predict tokens per second of decoded rows, given the acceptance that they had."""
    plain = [row for row in rows if row["method"] == "plain"]
    if not plain:
        return []
    first = min(plain, key=lambda row: (row["context"], row["batch"]))
    setting = settings.of(first, 0.0)
    seconds = setting.batch / first["tokens_per_second"]["median"]
    # Acceptance costs about as much as a layer.
    host = max(0.0, seconds - plain_round(setting).total) / (setting.model.layers + 1)
    found = []
    for row in rows:
        setting = settings.of(row, host)
        one = _round(row, setting)
        predicted = setting.batch * row["tau"] / one.total
        options = "".join(f" {key} {value}" for key, value in row["settings"].items())
        name = f"{row['method']}{options}, {row['model']}, {row['context']} tokens"
        measured = row["tokens_per_second"]["median"]
        name = f"{name}, batch {row['batch']}, temperature {row['temperature']:g}"
        found.append(Check(name, "tokens/s", predicted, measured, row is first))
    return found


def _round(row: dict, setting: Setting) -> Round:
    """Return the round of a decoded row's method at its settings."""
    of_method, options = _ROUNDS[row["method"]]
    # What a method chose by itself ("auto") is predicted as its default.
    given = {k: v for k, v in row["settings"].items() if k in options and v != "auto"}
    return of_method(setting, **given)

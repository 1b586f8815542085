"""Predictions beside what was measured, with their error."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specattn.ops.cost import Cost

from .machines import Machine, calibrating, packed_rows, read_results
from .models import MODELS
from .passes import Setting, pass_time, select_time
from .predict import MIN_TOKENS, RATIO, plain_round, vegas_round

_VEGAS = ("gamma", "ratio", "min_tokens")
_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4, "bfloat16": 2, "float16": 2, "float32": 4}


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


def checks(path: Path, machine: Machine) -> tuple[list[Check], Machine]:
    """Predict every row of a result file that the model covers.

    Parameters
    ----------
    path : Path
        JSON Lines of ``bench/run_kernels.py`` or ``bench/run_decoding.py``.
    machine : Machine
        The host's time per layer is taken from the file's plain step at the shortest context, if
        it has one; that row is marked as calibrated.

    Returns
    -------
    list of Check
    machine : Machine
        As calibrated.

    Raises
    ------
    ValueError
        The file is missing or is no result of a benchmark.
    """
    run, records = read_results(path)
    kernels = [row for row in records if row["kind"] == "row" and "op" in row]
    own = machine.results is not None and machine.results.resolve() == path.resolve()
    found = list(_kernels(kernels, machine, own))
    passes = [row for row in records if row["kind"] == "pass"]
    rounds = [row for row in records if row["kind"] == "row" and "method" in row]
    size = _SIZES.get(str((run.get("model") or {}).get("dtype", "")).removeprefix("torch."), 2)
    steps = [row for row in passes if row["name"] == "plain step"]
    if steps:
        first = min(steps, key=lambda row: row["context"])
        machine = _host_from(first, machine, size)
        found += [_pass(row, machine, size, first) for row in passes]
    found += list(_rounds(rounds, machine, size))
    return found, machine


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


def _host_from(row: dict, machine: Machine, size: int) -> Machine:
    """Return the machine with the host's time that explains one measured plain step."""
    setting = Setting(MODELS[row["model"]], machine, row["context"], size=size)
    predicted = pass_time(setting, 1)
    left = row["time"]["median"] - predicted.weights - predicted.attention
    return machine.with_layer_seconds(max(0.0, left) / setting.model.layers)


def _pass(row: dict, machine: Machine, size: int, calibration: dict) -> Check:
    setting = Setting(MODELS[row["model"]], machine, row["context"], size=size)
    selected = max(MIN_TOKENS, round(RATIO * row["context"]))
    if row["name"] == "select":
        predicted = select_time(setting, selected)
    else:
        predicted = pass_time(
            setting,
            row["rows"],
            selected=selected if row["name"] == "draft step" else None,
            collect=row["name"] == "verify, scores",
        ).total
    name = f"{row['name']}, {row['model']}, {row['context']} tokens"
    return Check(name, "ms", 1e3 * predicted, 1e3 * row["time"]["median"], row is calibration)


def _rounds(rows: Sequence[dict], machine: Machine, size: int) -> Iterator[Check]:
    """Predict tokens per second of decoded rows, given the acceptance that they had."""
    for row in rows:
        if (
            row.get("fault")
            or row["model"] not in MODELS
            or row["method"] not in ("plain", "vegas")
        ):
            continue
        setting = Setting(
            MODELS[row["model"]], machine, row["context"], batch=row["batch"], size=size
        )
        if row["method"] == "plain":
            one = plain_round(setting)
        else:
            known = {key: row["settings"][key] for key in _VEGAS if key in row["settings"]}
            one = vegas_round(setting, **{"gamma": 6, **known})
        predicted = setting.batch * row["tau"] / one.total
        name = f"{row['method']} {row['settings'] or ''}, {row['model']}, {row['context']} tokens"
        measured = row["tokens_per_second"]["median"]
        yield Check(f"{name}, batch {row['batch']}", "tokens/s", predicted, measured)

"""Compares predictions with recorded measurements."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specattn.ops.cost import Cost

from .acceptance import METHOD_PROFILES
from .machines import Machine, calibrating, packed_rows, read_results
from .models import EMBEDDED_TARGET, MODELS, ModelShape
from .passes import Workload, pass_time, select_time
from .rounds import ROUNDS, Round, plain_round

_SIZES = {
    "vegas": {"gamma"},
    "longspec": {"gamma", "widths", "nodes"},
    "tokenswift": {"widths"},
    "poss": {"total_tokens"},
}
"""By method, the options of which any one fixes how much is drafted."""
_PLANNED = ("plain step", "verify", "verify, scores", "select", "draft step")


@dataclass(frozen=True)
class Check:
    """One measured figure and its prediction.

    Attributes
    ----------
    name : str
    unit : str
        Of both figures.
    predicted, measured : float
    calibrated : bool
        The prediction was made from this very figure.
    """

    name: str
    unit: str
    predicted: float
    measured: float
    calibrated: bool = False

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
    models = [one.get("model") or {} for one in (run, *records) if one["kind"] == "run"]
    workloads = _Workloads(models, machine)
    passes = [row for row in records if row["kind"] == "pass" and workloads.covers(row)]
    rounds = [row for row in rows if row.get("method") in ROUNDS and workloads.covers(row)]
    found += _passes(passes, workloads)
    found += _rounds([row for row in rounds if not row["fault"]], workloads)
    return found


@dataclass(frozen=True)
class _Workloads:
    """What all rows of a file of decoding share."""

    models: list[dict]  # of all runs that wrote it
    machine: Machine

    def of(self, row: dict, layer_seconds: float) -> Workload:
        """Return the workload that a row was measured in."""
        model = self._model(row)
        if sizes := model.get("shape"):
            shape = ModelShape(**sizes)
        else:  # of a file that does not say it
            shape = ModelShape.named(_shape(row))
            shape = replace(shape, layers=model.get("layers", shape.layers))
        size = 4 if model.get("dtype") == "float32" else 2
        host = self.machine.with_layer_seconds(layer_seconds)
        return Workload(shape, host, row["context"], batch=row.get("batch", 1), size=size)

    def _model(self, row: dict) -> dict:
        named = (model for model in self.models if model.get("name") == row["model"])
        return next(named, self.models[0])

    def covers(self, row: dict) -> bool:
        """Whether the shape of a row's model is known."""
        return "shape" in self._model(row) or _shape(row) in (*MODELS, EMBEDDED_TARGET.name)


def _shape(row: dict) -> str:
    """Return whose shape a row's model has; it may be cut to fewer layers."""
    return row["model"].partition(" cut to ")[0]


def errors(found: Sequence[Check]) -> tuple[float, float]:
    """Return the median and the largest absolute error of what was not calibrated."""
    sizes = [abs(one.error) for one in found if not one.calibrated]
    return (statistics.median(sizes), max(sizes)) if sizes else (0.0, 0.0)


def compared(path: Path, machine: Machine) -> list[str]:
    """Return what a file has beside what is predicted for a machine: the worst first, in lines."""
    found = checks(path, machine)
    lines = [f"{path}, predicted for {machine.name}"]
    for one in sorted(found, key=lambda check: -abs(check.error)):
        figures = f"{one.error:+6.0%}  {one.predicted:10.3f} {one.measured:10.3f} {one.unit:9}"
        known = "  (calibrated on this row)" if one.calibrated else ""
        lines.append(f"{figures}{one.name}{known}")
    median, worst = errors(found)
    count = sum(not one.calibrated for one in found)
    told = f"{count} rows predicted: median error {median:.0%}, largest {worst:.0%}"
    return [*lines, told]


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
            f"{name}, {row['rows']} rows", "ms", 1e3 * predicted, 1e3 * row["time"]["median"], known
        )


def _passes(rows: list[dict], workloads: _Workloads) -> list[Check]:
    rows = [row for row in rows if row["name"] in _PLANNED]
    steps = [row for row in rows if row["name"] == "plain step"]
    if not steps:
        return []
    first = min(steps, key=lambda row: row["context"])
    workload = workloads.of(first, 0.0)
    left = first["time"]["median"] - pass_time(workload, 1).total
    host = max(0.0, left) / workload.model.layers
    options, found = _defaults("vegas"), []
    for row in rows:
        workload = workloads.of(row, host)
        selected = max(options["min_tokens"], round(options["ratio"] * row["context"]))
        if row["name"] == "select":
            predicted = select_time(workload, selected) + workloads.machine.cold_seconds
        else:
            predicted = pass_time(
                workload,
                row["rows"],
                selected=selected if row["name"] == "draft step" else None,
                collect=row["name"] == "verify, scores",
            ).total
        name = f"{row['name']}, {row['model']}, {row['context']} tokens"
        measured = 1e3 * row["time"]["median"]
        found.append(Check(name, "ms", 1e3 * predicted, measured, row is first))
    return found


def _rounds(rows: list[dict], workloads: _Workloads) -> list[Check]:
    """Predict tokens per second of decoded rows, given the acceptance that they had."""
    plain = [row for row in rows if row["method"] == "plain"]
    if not plain:
        return []
    first = min(plain, key=lambda row: (row["context"], row["batch"]))
    workload = workloads.of(first, 0.0)
    seconds = workload.batch / first["tokens_per_second"]["median"]
    # Acceptance costs about as much as a layer.
    host = max(0.0, seconds - plain_round(workload).total) / (workload.model.layers + 1)
    found = []
    for row in rows:
        workload = workloads.of(row, host)
        one = _round(row, workload)
        predicted = workload.batch * row["tau"] / one.total
        options = "".join(f" {key} {value}" for key, value in row["settings"].items())
        name = f"{row['method']}{options}, {row['model']}, {row['context']} tokens"
        measured = row["tokens_per_second"]["median"]
        name = f"{name}, batch {row['batch']}, temperature {row['temperature']:g}"
        found.append(Check(name, "tokens/s", predicted, measured, row is first))
    return found


def _round(row: dict, workload: Workload) -> Round:
    """Return the round of a decoded row's method at its settings.

    Settings that a row lacks are the method's defaults. Drafts that sized themselves were as large
    as what they brought and the share of it that was accepted say.
    """
    method = row["method"]
    chosen = {name: value for name, value in row["settings"].items() if value not in (None, "auto")}
    options = {**_defaults(method), **chosen}
    _, *taken = inspect.signature(ROUNDS[method]).parameters
    fixed = chosen.keys() & _SIZES.get(method, set())
    if fixed or not row.get("acceptance_rate"):
        return ROUNDS[method](workload, **{name: options[name] for name in taken})
    accepted = row["tau"] - 1
    drafted = accepted / row["acceptance_rate"]
    share = 1 - row.get("details", {}).get("rounds without a draft", 0) / row["rounds"]
    levels = 1 + round(accepted / share)  # the last of which was not accepted
    options |= {"gamma": drafted / share, "depth": levels}
    if method == "longspec":
        options["widths"] = options["widths"][:levels]
    found = ROUNDS[method](workload, **{name: options[name] for name in taken})
    verify = pass_time(workload, 1 + drafted, collect=method == "vegas")
    return replace(found, draft=share * found.draft, verify=verify)


def _defaults(method: str) -> dict[str, Any]:
    """Return a method's defaults; those that depend on its drafter as in the profile."""
    from specattn.decoding import METHODS  # with transformers, which a plan does without

    of_profile = METHOD_PROFILES[method].options if method in METHOD_PROFILES else {}
    parameters = inspect.signature(METHODS[method]).parameters.values()
    own = {one.name: one.default for one in parameters if one.default is not None}
    largest = {"gamma": getattr(METHODS[method], "most_gamma", None)}
    return {"window": None, **largest, **of_profile, **own}

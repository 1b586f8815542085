"""Measure one row: correctness first, then ours and every peer in turn."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict

import torch
from common.clock import Stopwatch, paired_ratio, timing
from common.records import Record

from .cases import DTYPES, Case
from .ceilings import Ceilings
from .inputs import Draw
from .peers import QUICK
from .workloads import Outputs, build

OURS, PROBE = "specattn", "memory"
COPIES = {"cpu": 1, "cuda": 3}  # sets of inputs that calls take in turn
WRONG = "WRONG"
# Largest relative error of one output row. An attention row in bf16 errs by about 4e-3; leaving out
# one block of 64 keys of 32768 shows as 4e-2.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
FLOAT64_ELEMENTS = 1 << 25  # what is larger is checked against float32: memory, not precision


def measure(
    case: Case,
    stopwatch: Stopwatch,
    ceilings: Ceilings,
    budget: float,
    wanted: tuple[str, ...] = QUICK,
) -> Record:
    """Check ``case`` against the reference; time it and its peers only when it is right.

    The row for JSON has times in seconds, bandwidth in bytes per second; one with a ``fault``
    (`WRONG`, or what an exception said) has no time.
    """
    device = stopwatch.device
    works = [build(case, Draw(case, device, seed)) for seed in range(COPIES[device.type])]
    cached = 2 * case.batch * case.context * case.shape.kv_heads * case.shape.head_dim
    wide = torch.float64 if cached + case.weights <= FLOAT64_ELEMENTS else torch.float32
    expected, tolerance = works[0].expected(wide), TOLERANCE[DTYPES[case.dtype]]
    error, fault, ours = _admit([work.call for work in works], expected, tolerance, stopwatch)
    cost = works[0].cost
    row: Record = {"kind": "row", **asdict(case), "shape": case.shape.name}
    row |= {"fault": fault, "error": error if math.isfinite(error) else None}
    row |= {"bytes_read": cost.read, "bytes_written": cost.written, "operations": cost.operations}
    row |= dict.fromkeys(("time", "bandwidth", "ceiling", "bounds", "bound", "share"))
    row |= {"peers": {}, "refused": {}}
    if ours is None:
        return row
    ready = {PROBE: ceilings.probe.call, OURS: ours}
    everyone = [work.peers(wanted) for work in works]
    for name in everyone[0]:
        calls = [one[name] for one in everyone]
        _, reason, call = _admit(calls, expected, tolerance, stopwatch)
        if call is None:
            row["refused"][name] = reason
        else:
            ready[name] = call
    del expected
    times = stopwatch.alternate(ready, budget=budget)
    ceiling = ceilings.probe.bytes / statistics.median(times.pop(PROBE))
    bounds = ceilings.bounds(cost, case.dtype, ceiling)
    bound = max(bounds, key=bounds.__getitem__)
    own = times.pop(OURS)
    time = timing(own)
    row |= {"time": time, "bandwidth": cost.bytes / time["median"], "ceiling": ceiling}
    row |= {"bounds": bounds, "bound": bound, "share": bounds[bound] / time["median"]}
    for name, samples in times.items():
        row["peers"][name] = {**timing(samples), "ratio": paired_ratio(own, samples)}
    return row


def _admit(
    calls: list[Callable[[], Outputs]], expected: Outputs, tolerance: float, stopwatch: Stopwatch
) -> tuple[float, str | None, Callable | None]:
    """Return the error of the first call, and why not or what to time: the calls in turn."""
    try:
        error, right = compare(calls[0](), expected, tolerance)
        if not right:
            return error, WRONG, None
        ready = itertools.cycle([stopwatch.prepare(call) for call in calls])
        return error, None, lambda: next(ready)()
    except Exception as failure:  # one broken kernel must not cost the other rows
        return math.inf, f"{type(failure).__name__}: {failure}".splitlines()[0], None


def memory_needed(case: Case, device: torch.device) -> int:
    """Return about how many bytes a row takes at its peak.

    The reference widens weights, or the cache to float32 and half of it again; a peer may repeat
    each KV head for its group, another copies the pages together.
    """
    widened = 1.5 * 4 / DTYPES[case.dtype].itemsize
    group, copies = case.shape.q_heads // case.shape.kv_heads, COPIES[device.type]
    weights = case.weights * DTYPES[case.dtype].itemsize * (copies + 2 * widened)
    return int(case.cache_bytes * (2 + copies + max(widened, group + 1)) + weights)


def compare(actual: Outputs, expected: Outputs, tolerance: float) -> tuple[float, bool]:
    """Return the worst error of all outputs that ``actual`` has, and whether it may be.

    An output of a coarser type than the inputs (collected logits are always bf16) may err as that.
    """
    errors = {name: row_error(value, expected[name]) for name, value in actual.items()}
    allowed = {name: max(tolerance, TOLERANCE.get(x.dtype, 0.0)) for name, x in actual.items()}
    return max(errors.values()), all(errors[name] <= allowed[name] for name in errors)


def row_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest over rows (last dimension) of |actual - expected| / |expected|.

    Infinite for another shape, for NaN, for -inf in other places and for unequal integers.
    """
    if actual.shape != expected.shape:
        return math.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else math.inf
    actual, empty = actual.to(expected.dtype), expected.isneginf()
    if not torch.equal(actual.isneginf(), empty):
        return math.inf
    expected = expected.masked_fill(empty, 0)
    difference = torch.linalg.vector_norm(actual.masked_fill(empty, 0) - expected, dim=-1)
    size = torch.linalg.vector_norm(expected, dim=-1)
    worst = torch.where(difference == 0, 0, difference / size).max().item()
    return math.inf if math.isnan(worst) else worst

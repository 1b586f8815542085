"""Measure the values of the CPU kernels (csrc/cpu/tuning.h) here, and record what is fastest.

    python bench/tune_cpu.py --budget 1
    python bench/tune_cpu.py --only stream_ahead --only tile_ahead --write

One value after the other: all its candidates take turns over the same calls, which find their
memory cold. A candidate is taken where it beats the present value twice, measured anew the second
time, while no other program uses the machine. Results are the same bits whatever the values.
`--write` puts the row of this machine into csrc/cpu/tuned.h, for the next build. SPECATTN_CPU_ISA
forces another code path.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from common import arguments
from common.clock import paired_ratio, spread
from common.machine import DISTURBING, REPOSITORY, describe, heading
from common.records import Record, RecordFile
from kernels.bar import CPU, Bench, right
from kernels.bars import HYBRID, LAYER, STATES, THREADS
from kernels.cases import Case
from kernels.rotation import Rotation

from specattn import _cpu  # type: ignore[attr-defined]
from specattn.blocks.kernels import Kernels, Memory
from specattn.blocks.operands import Projection
from specattn.machine_load import Others
from specattn.planning import MODELS

GAIN, LOSS = 1.01, 0.99  # what all calls must gain in the mean, and none may lose
TABLE = REPOSITORY / "csrc/cpu/tuned.h"
FEW = {f"attention, {rows} rows": replace(HYBRID, rows=rows) for rows in (1, 2)} | {
    "attention, fp32, 1 row": replace(HYBRID, dtype="fp32")
}
LINEAR = {f"linear, {rows} rows": replace(LAYER, rows=rows) for rows in (1, 8)}
CODES = {
    f"linear, int{bits}, {rows} rows": replace(LAYER, variant=f"output, int{bits}", rows=rows)
    for bits in (8, 4)
    for rows in (1, 16)
}
SCORED = {"importance": replace(HYBRID, op="importance_scores", variant="per head", rows=8)}
LAYER_STATES = {
    f"gated delta, {rows} rows": replace(STATES, op="gated_delta_tree", rows=rows, batch=8)
    for rows in (8, 16)
}
TILES = {f"attention, {rows} rows": replace(HYBRID, rows=rows, variant="tree") for rows in (4, 16)}
SHORT = {f"attention, {n} keys": replace(HYBRID, context=n) for n in (16, 64, 256)} | {
    f"linear, tiny, {variant}": replace(LAYER, shape=MODELS["tiny"], variant=variant)
    for variant in ("output", "gate and up")
}
MANY = {"products, 512 rows": replace(LAYER, rows=512)}


@dataclass(frozen=True)
class Value:
    """What may be tried, and the calls that show it."""

    candidates: tuple[int, ...]
    cases: dict[str, Case]
    isas: tuple[str, ...] = ()  # that know it; all unless given


VALUES = {
    "wide": Value((0, 1), FEW | TILES, ("avx512_bf16",)),
    "panels": Value((0, 1), MANY, ("avx512_bf16",)),
    "lead_lines": Value((64, 128, 256, 384, 512, 1024), FEW, ("avx512_bf16",)),
    "heads_abreast": Value((2, 4, 8), FEW),
    "stream_ahead": Value((1024, 2048, 4096, 8192, 16384), LINEAR),
    "tile_ahead": Value((2048, 4096, 8192, 16384, 32768), CODES),
    "key_ahead": Value((512, 1024, 2048, 4096, 8192), SCORED),
    "packed_bytes": Value((8192, 16384, 32768), LINEAR | CODES),
    "panel_depth": Value((1024, 2048, 4096), MANY, ("avx512_bf16",)),
    "state_floats": Value((2048, 4096, 8192, 16384), LAYER_STATES),
    "linear_pieces": Value((2, 4, 8), LINEAR | CODES),
    # Half as much is faster while all threads are awake, and does not pay for waking one.
    "thread_work": Value((1 << 17, 1 << 18, 1 << 19, 1 << 20), SHORT),
}


class Tuner:
    """Takes one value after the other; `values` are those of the code path by now."""

    def __init__(self, budget: float, show: Callable[[Record], None]) -> None:
        self.bench, self.budget, self.show = Bench(budget), budget, show
        self.others = Others()
        self.values = values_of(_cpu.tuning())
        self._calls: dict[str, Callable] = {}

    def tune(self, name: str) -> None:
        """Give a value its fastest candidate."""
        value, present = VALUES[name], self.values[name]
        candidates = dict.fromkeys((present, *value.candidates))
        gains = self.measure(name, list(candidates))
        faster = {one: _mean(found) for one, found in gains.items() if _faster(found)}
        if faster:
            best = max(faster, key=faster.__getitem__)
            again = self.measure(name, [present, best])
            if _faster(again[best]):
                self.values[name] = best
        _cpu.tune(f"{name}={self.values[name]}")

    def measure(self, name: str, candidates: list[int]) -> dict[int, list[float]]:
        """Return by candidate how many times faster than the first each call is."""
        gains: dict[int, list[float]] = {candidate: [] for candidate in candidates}
        for label, case in VALUES[name].cases.items():
            call = self.call(label, case)
            self.others.cores()  # up to here
            seconds = self.alternate(name, candidates, call)
            busy = self.others.cores() or 0.0
            for candidate, samples in seconds.items():
                gain = paired_ratio(samples, seconds[candidates[0]])
                found = {"value": name, "candidate": candidate, "call": label, "gain": gain}
                found |= {"seconds": median(samples), "spread": spread(samples), "others": busy}
                self.show(found)
                gains[candidate].append(math.nan if busy > DISTURBING else gain)  # never faster
        return gains

    def alternate(self, name: str, candidates: list[int], call: Callable) -> dict[int, list[float]]:
        """Return seconds by candidate, all in turn, each behind a call that finds threads awake."""
        seconds: dict[int, list[float]] = {candidate: [] for candidate in candidates}
        order, end = list(candidates), time.perf_counter() + self.budget
        while time.perf_counter() < end or len(seconds[order[0]]) < 7:
            for candidate in order:
                _cpu.tune(f"{name}={candidate}")
                call()
                start = time.perf_counter()
                call()
                seconds[candidate].append(time.perf_counter() - start)
            order.append(order.pop(0))
        return seconds

    def call(self, label: str, case: Case) -> Callable:
        """Return a call whose output is right, at the next place every time."""
        if label not in self._calls:
            rotation = Rotation(self.bench.pool, case)
            if label in MANY:
                calls = [_many(place, case) for place in rotation.places]
            else:
                works = rotation.workloads(case)
                if not right(works[0]):
                    raise RuntimeError(f"{label}: the output is wrong")
                calls = [work.call for work in works]
            self._calls[label] = rotation.turn(calls)
        return self._calls[label]


def values_of(text: str) -> dict[str, int]:
    """Return the values of "wide=1 panels=0 ...", by name."""
    return {name: int(number) for name, _, number in (one.partition("=") for one in text.split())}


def row(values: dict[str, int]) -> str:
    """Return this machine's row, with what differs from what an unknown machine has."""
    usual = values_of(_cpu.tuning_of("unknown unknown 0 0 0"))
    changed = [f"{name}={value}" for name, value in values.items() if value != usual[name]]
    return " ".join([f"{_cpu.machine()}:", *changed])


def write(path: Path, line: str) -> None:
    """Put a row into the table, in the place of the one that its machine had."""
    lines, key = path.read_text(encoding="utf-8").splitlines(keepends=True), line.split(":")[0]
    lines = [one for one in lines if one.split(":")[0] != key]
    lines.insert(lines.index(')";\n'), f"{line}\n")
    path.write_text("".join(lines), encoding="utf-8")


def _many(place: torch.Tensor, case: Case) -> Callable:
    """Multiply many rows as a prompt does: by our panels or by torch, as the values say."""
    x = torch.randn(case.rows, place.shape[-1]).to(place.dtype)
    return partial(Kernels(Memory()).linear, x, Projection(place[0], None))


def _mean(gains: list[float]) -> float:
    return math.prod(gains) ** (1 / len(gains))


def _faster(gains: list[float]) -> bool:
    return _mean(gains) > GAIN and all(gain > LOSS for gain in gains)


def main(argv: list[str] | None = None) -> int:
    """Tune, print what was found and the row; return 0."""
    parser = arguments.Parser(prog="tune_cpu.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--only", choices=VALUES, action="append", help="one value; may be repeated")
    add("--budget", type=arguments.positive, default=1.0, metavar="S", help="for each call's turns")
    add("--write", action="store_true", help="put the row into csrc/cpu/tuned.h")
    add("--json", type=Path, metavar="FILE", help="write JSON Lines")
    options = parser.parse_args(argv)
    torch.set_num_threads(THREADS)
    with parser.refusing():
        file = RecordFile(options.json)
    file.add({"kind": "run", "tuned": _cpu.machine(), **describe(CPU)})
    print(f"{heading(file.records[0])} | {_cpu.machine()} | {_cpu.tuning()}")

    def show(found: Record) -> None:
        file.add({"kind": "candidate", **found})
        one = f"{found['value']}={found['candidate']}"
        time = f"{1e3 * found['seconds']:.3f} ms ±{found['spread']:.0%}"
        note = "disturbed" if found["others"] > DISTURBING else ""
        print(f"{one:22} {found['call']:24} {found['gain']:.3f}  {time:16} {note}", flush=True)

    with torch.inference_mode():
        tuner = Tuner(options.budget, show)
        for name in options.only or VALUES:
            isas = VALUES[name].isas
            if not isas or _cpu.isa() in isas:
                tuner.tune(name)
    line = row(tuner.values)
    file.add({"kind": "row", "row": line})
    print(line)
    if options.write:
        write(TABLE, line)
        print(f"written to {TABLE.relative_to(REPOSITORY)}: build again")
    return 0


if __name__ == "__main__":
    sys.exit(main())

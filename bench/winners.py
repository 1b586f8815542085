"""Record the fastest backend by shape from sweeps of several, for backends to read.

    python bench/run_kernels.py --backend cuda --json cuda.jsonl ...
    python bench/run_kernels.py --backend triton --json triton.jsonl ...
    python bench/winners.py cuda.jsonl triton.jsonl

It goes into the record of GPUs in the user's folder for caches; docs/benchmarks.md tells who reads.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path

from common.records import Record, of_kind, whole_lines

from specattn import gpu_record
from specattn.planning import MODELS

Seconds = dict[gpu_record.Shape, dict[str, float]]


def shape_of(row: Record) -> gpu_record.Shape:
    """Return what of a row of the sweep decides who is fastest."""
    model = MODELS[row["shape"]]
    rows = row["rows"] * (model.q_heads // model.kv_heads)
    return gpu_record.Shape(
        row["op"], row["dtype"], model.head_dim, rows, row["context"], row["batch"]
    )


def seconds(sweeps: Iterable[list[Record]]) -> Seconds:
    """Return, by shape and backend, the geometric mean of a call's time over what all measured."""
    times: dict[tuple, dict[str, float]] = {}
    for records in sweeps:
        backend = of_kind(records, "run")[0]["backend"]
        for row in of_kind(records, "row"):
            if row["time"] and not row["fault"]:
                case = shape_of(row), row["variant"], row["page_size"], row["sparsity"]
                times.setdefault(case, {})[backend] = row["time"]["median"]
    logs: dict[gpu_record.Shape, dict[str, list[float]]] = {}
    for (shape, *_), by_backend in times.items():
        if len(by_backend) > 1:
            for backend, time in by_backend.items():
                logs.setdefault(shape, {}).setdefault(backend, []).append(math.log(time))
    return {
        shape: {
            backend: math.exp(sum(x) / len(x))
            for backend, x in of.items()
            if len(x) == max(map(len, of.values()))  # what serves only some cases does not compare
        }
        for shape, of in logs.items()
    }


def rows(measured: Seconds) -> list[Record]:
    """Return what `gpu_record.note_fastest` takes."""
    return [
        {"shape": shape._asdict(), "winner": min(times, key=times.__getitem__), "seconds": times}
        for shape, times in sorted(measured.items())
    ]


def text(measured: Seconds) -> str:
    """Return the table for people, in Markdown."""
    names = sorted({name for times in measured.values() for name in times})
    lines = [
        f"| primitive | rows | keys | batch | {' | '.join(f'{x} [us]' for x in names)} | fastest |",
        "|---" * (len(names) + 5) + "|",
    ]
    for shape, times in sorted(measured.items()):
        cells = [f"{times[x] * 1e6:.1f}" if x in times else "" for x in names]
        sizes = (f"{shape.op} {shape.dtype} D {shape.head_dim}", *shape[3:])
        lines.append(f"| {' | '.join(map(str, (*sizes, *cells, min(times, key=times.get))))} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Record and print who is fastest; 2 where the sweeps do not belong together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="+", type=Path, help="JSON Lines of run_kernels.py")
    options = parser.parse_args(arguments)
    sweeps = [whole_lines(path) for path in options.sweeps]
    machines = {of_kind(records, "run")[0]["machine"]["name"] for records in sweeps}
    if len(machines) > 1:
        parser.error(f"expected sweeps of one machine, got {', '.join(sorted(machines))}")
    measured = seconds(sweeps)
    gpu_record.note_fastest(machines.pop(), rows(measured))
    print(text(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Make a table of the fastest backend by shape from sweeps of several, for backends to read.

    python bench/run_kernels.py --backend cuda --json cuda.jsonl ...
    python bench/run_kernels.py --backend triton --json triton.jsonl ...
    python bench/winners.py cuda.jsonl triton.jsonl

It goes into the user's folder for caches, or where --out says; docs/benchmarks.md tells who reads.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path

from common.records import Record, of_kind, whole_lines

from specattn.backends import winners
from specattn.files import write_atomically
from specattn.planning import MODELS

Seconds = dict[winners.Shape, dict[str, float]]


def shape_of(row: Record) -> winners.Shape:
    """Return what of a row of the sweep decides who is fastest."""
    model = MODELS[row["shape"]]
    rows = row["rows"] * (model.q_heads // model.kv_heads)
    return winners.Shape(
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
    logs: dict[winners.Shape, dict[str, list[float]]] = {}
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


def table(gpu: str, measured: Seconds) -> Record:
    """Return the table as `winners` reads it."""
    rows = [
        {"shape": shape._asdict(), "winner": min(times, key=times.__getitem__), "seconds": times}
        for shape, times in sorted(measured.items())
    ]
    return {"schema": winners.SCHEMA, "gpu": gpu, "rows": rows}


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
    """Write and print the table; 2 where the sweeps do not belong together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="+", type=Path, help="JSON Lines of run_kernels.py")
    parser.add_argument("--out", type=Path, default=winners.path(), help="default: %(default)s")
    options = parser.parse_args(arguments)
    sweeps = [whole_lines(path) for path in options.sweeps]
    machines = {of_kind(records, "run")[0]["machine"]["name"] for records in sweeps}
    if len(machines) > 1:
        parser.error(f"expected sweeps of one machine, got {', '.join(sorted(machines))}")
    measured = seconds(sweeps)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(table(machines.pop(), measured), indent=1) + "\n"
    write_atomically(options.out, lambda partial: partial.write_text(content, encoding="utf-8"))
    print(text(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure every primitive on this machine, against its memory bandwidth and against torch.

    python bench/run_kernels.py --quick
    python bench/run_kernels.py --only hybrid_tree_attention --context 8k,32k --rows 1,16 --worst
    python bench/run_kernels.py --bars

`docs/benchmarks.md` says how to read the table and names every JSON field.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from roofline import arguments, report
from roofline.cases import DTYPES, SHAPES, Case, sweep
from roofline.ceilings import Ceilings
from roofline.ceilings import measure as measure_ceilings
from roofline.machine import describe, serving
from roofline.measure import WRONG, Row, measure
from roofline.others import Others
from roofline.timing import Stopwatch
from roofline.workloads import OPS

import specattn

# What is swept when the command line does not say; per device, thorough and quick.
DEFAULTS = {
    ("cpu", False): {"context": [8192, 32768], "rows": [1, 8, 16, 64], "batch": [1]},
    ("cpu", True): {"context": [4096], "rows": [1, 16], "batch": [1]},
    ("cuda", False): {"context": [32768, 131072], "rows": [1, 8, 16, 64], "batch": [1, 8]},
    ("cuda", True): {"context": [32768], "rows": [1, 16], "batch": [1]},
}
DISTURBING = 0.2  # cores that others use, from which on absolute times mean little
SWEPT_SHAPES = {False: ["llama-3.1-8b", "tiny"], True: ["llama-3.1-8b"]}


def main(argv: list[str] | None = None) -> int:
    """Run the sweep; return 0 when all is right, 1 for a fault, 2 for bad arguments, 130 cut."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.bars:
        return _bars(options, parser)
    device = arguments.device(options.device, parser)
    cases = _cases(options, device, parser)
    with ExitStack() as stack:
        try:
            stack.enter_context(_backend(options.backend))
            file = stack.enter_context(open(options.json, "w")) if options.json else None
        except (ValueError, RuntimeError, OSError) as failure:
            parser.error(str(failure).splitlines()[0])
        machine = describe(device)
        backend = options.backend if options.backend != "auto" else serving(device)
        ceilings = measure_ceilings(device, seconds=0.5 if options.quick else 2.0)
        print(_heading(machine, backend, ceilings))
        report.write_line(file, report.run_record(machine, backend, ceilings))
        rows = _measure_all(cases, device, options.budget, ceilings, file)
    if options.worst:
        rows.sort(key=lambda row: row.bandwidth or 0.0)
    report.table(rows)
    faults = [row for row in rows if row.fault]
    for row in faults:
        print(f"{row.case.op} {row.case.variant}: {row.fault}", file=sys.stderr)
    if disturbed := sum((row.others or 0.0) > DISTURBING for row in rows):
        print(f"{disturbed} of {len(rows)} rows were measured while others used the machine")
    if len(rows) < len(cases):
        print(f"interrupted: {len(rows)} of {len(cases)} rows", file=sys.stderr)
        return 130
    return int(bool(faults))


def _bars(options: argparse.Namespace, parser: arguments.Parser) -> int:
    """Measure what the CPU kernels have to reach; return 1 when an output was wrong."""
    if specattn.backends()["cpu"] != "available":
        parser.error(f"--bars: {specattn.backends()['cpu']}")
    from roofline import bars  # needs the compiled kernels

    for name in options.only or ():
        if not any(key.startswith(name) for key in bars.SUITE):
            parser.error(f"--only: expected the beginning of {', '.join(bars.SUITE)}, got '{name}'")
    machine, others = describe(torch.device("cpu")), Others()
    wrong = False
    with open(options.json, "w") if options.json else nullcontext() as file, torch.inference_mode():
        report.write_line(file, {"kind": "run", "schema": report.SCHEMA, **machine})
        print(f"{machine['machine']['name']} | commit {machine['commit']} | {bars.THREADS} threads")
        for bar in bars.measure(options.only or [], options.budget or 1.0):
            busy = others.cores()
            report.write_line(file, {"kind": "bar", **asdict(bar), "met": bar.met, "others": busy})
            report.bar(bar, disturbed=(busy or 0) > DISTURBING)
            wrong = wrong or bar.note == WRONG
    return int(wrong)


def _measure_all(
    cases: list[Case], device: torch.device, budget: float, ceilings: Ceilings, file
) -> list[Row]:
    """Return the rows; those that were finished when an interrupt ends the sweep early."""
    stopwatch, others = Stopwatch(device), Others()
    rows = []
    with (
        report.progress(len(cases)) as show,
        torch.inference_mode(),
        suppress(KeyboardInterrupt),
    ):
        for case in cases:
            show(f"{case.op} {case.variant}")
            row = measure(case, stopwatch, ceilings.probe, budget)
            rows.append(replace(row, others=others.cores()))
            report.write_line(file, report.row_record(rows[-1]))
    return rows


def _parser() -> arguments.Parser:
    parser = arguments.Parser(prog="run_kernels.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--backend", choices=("auto", *specattn.backends()), default="auto")
    add("--only", metavar="OP", action="append", help="one primitive, or bar; may be repeated")
    add("--bars", action="store_true", help="what the CPU kernels have to reach")
    add("--shape", choices=SHAPES, action="append", help="model shape; may be repeated")
    add("--context", type=arguments.numbers, metavar="N[,N]", help="cached tokens, such as 8k,32k")
    add("--rows", type=arguments.numbers, metavar="T[,T]", help="query rows per request")
    add("--batch", type=arguments.numbers, metavar="B[,B]", help="requests")
    add("--dtype", choices=DTYPES, default="bf16")
    add(
        "--budget",
        type=arguments.positive,
        metavar="S",
        help="seconds for one row and peers",
    )
    add("--quick", action="store_true", help="under two minutes on two cores")
    add("--worst", action="store_true", help="lowest bandwidth first")
    add("--json", type=Path, metavar="FILE", help="write JSON Lines")
    return parser


def _cases(
    options: argparse.Namespace, device: torch.device, parser: arguments.Parser
) -> list[Case]:
    """Fill the options that were left open, and return the rows to measure."""
    for name in options.only or ():
        if name not in OPS:
            parser.error(f"--only: expected one of {', '.join(OPS)}, got '{name}'")
    for name, value in DEFAULTS[device.type, options.quick].items():
        setattr(options, name, getattr(options, name) or value)
    options.budget = options.budget or (0.5 if options.quick else 2.0)
    cases = [
        case
        for shape in options.shape or SWEPT_SHAPES[options.quick]
        for batch in options.batch
        for case in sweep(SHAPES[shape], options.dtype, batch, options.context, options.rows)
    ]
    return [case for case in cases if not options.only or case.op in options.only]


def _backend(name: str):
    return nullcontext() if name == "auto" else specattn.use_backend(name)


def _heading(machine: dict, backend: str, ceilings: Ceilings) -> str:
    return (
        f"{machine['machine']['name']} | commit {machine['commit']} | "
        f"torch {machine['versions']['torch']} | backend {backend}\n"
        f"read {ceilings.read / 1e9:.1f} GB/s ({ceilings.read_method}), "
        f"copy {ceilings.copy / 1e9:.1f} GB/s (read plus written)"
    )


if __name__ == "__main__":
    sys.exit(main())

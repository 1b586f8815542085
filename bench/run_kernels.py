"""Measure every primitive on this machine, against its memory bandwidth and against torch.

    python bench/run_kernels.py --quick
    python bench/run_kernels.py --only hybrid_tree_attention --context 8k,32k --rows 1,16 --worst
    python bench/run_kernels.py --bars
    python bench/run_kernels.py --compare before.jsonl after.jsonl

`docs/benchmarks.md` says how to read the table and names every JSON field.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from common import arguments
from common.clock import Stopwatch
from common.machine import DISTURBING, Others, describe, free_memory, serving
from kernels import comparison, peers, pictures, report
from kernels.cases import DTYPES, SHAPES, Axes, Case, sweep
from kernels.ceilings import Ceilings
from kernels.ceilings import measure as measure_ceilings
from kernels.measure import WRONG, Row, measure, memory_needed
from kernels.peers import FAMILIES, QUICK
from kernels.workloads import OPS

import specattn

# What is swept when the command line does not say; per device, thorough and quick.
DEFAULTS = {
    ("cpu", False): {"context": [8192, 32768], "rows": [1, 4, 8, 16, 32, 64, 69], "batch": [1]},
    ("cpu", True): {"context": [2048, 16384], "rows": [1, 16], "batch": [1]},
    ("cuda", False): {"context": [32768, 131072], "rows": [1, 8, 16, 64], "batch": [1, 8]},
    ("cuda", True): {"context": [32768], "rows": [1, 16], "batch": [1]},
}
THOROUGH = {
    False: {
        "shape": ["llama-3.1-8b", "tiny"],
        "page_size": [1, 16, 64],
        "sparsity": [0.03, 0.07, 0.2],
        "peers": list(FAMILIES),
    },
    True: {
        "shape": ["llama-3.1-8b"],
        "page_size": [16],
        "sparsity": [0.07],
        "peers": list(QUICK),
    },
}


def main(argv: list[str] | None = None) -> int:
    """Run the sweep; return 0 when all is right, 1 for a fault, 2 for bad arguments, 130 cut."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.bars:
        return _bars(options, parser)
    if options.compare:
        return _compare(options, parser)
    if options.draw:
        return _draw(options, parser)
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
        missing = peers.missing(device, options.peers)
        print(_heading(machine, backend, ceilings, missing))
        report.write_line(file, report.run_record(machine, backend, ceilings, missing))
        rows = _measure_all(cases, device, options, ceilings, file)
    if options.pictures:
        run = report.run_record(machine, backend, ceilings, missing)
        _pictures(run, [report.row_record(row) for row in rows], options.pictures)
    if options.worst:
        rows.sort(key=lambda row: row.share or 0.0)
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
    from kernels import bars  # needs the compiled kernels

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


def _compare(options: argparse.Namespace, parser: arguments.Parser) -> int:
    try:
        return comparison.KERNELS.show(*options.compare)
    except (OSError, ValueError) as failure:
        parser.error(f"--compare: {failure}")


def _draw(options: argparse.Namespace, parser: arguments.Parser) -> int:
    try:
        run, rows = comparison.KERNELS.read(options.draw)
    except (OSError, ValueError) as failure:
        parser.error(f"--draw: {failure}")
    kernels = [row for row in rows.values() if row["kind"] == "row"]
    return int(not _pictures(run, kernels, options.pictures or options.draw.parent))


def _pictures(run: dict, rows: list[dict], folder: Path) -> bool:
    """Draw what was measured, if it can be; a missing library must not cost the figures."""
    try:
        for path in pictures.draw(run, rows, folder):
            print(path)
    except (ImportError, OSError) as failure:
        print(f"no pictures: {failure}", file=sys.stderr)
        return False
    return True


def _measure_all(
    cases: list[Case],
    device: torch.device,
    options: argparse.Namespace,
    ceilings: Ceilings,
    file,
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
            row = measure(case, stopwatch, ceilings, options.budget, options.peers)
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
    add("--dtype", choices=DTYPES, action="append", help="default bf16; may be repeated")
    add("--page-size", type=arguments.numbers, metavar="N[,N]", help="tokens in a page")
    add("--sparsity", type=arguments.shares, metavar="P[,P]", help="selected share of the context")
    add("--collect", choices=("off", "scores", "logits"), action="append", help="of verification")
    add("--peers", choices=FAMILIES, metavar="NAME", action="append", help=", ".join(FAMILIES))
    add(
        "--budget",
        type=arguments.positive,
        metavar="S",
        help="seconds for one row and peers",
    )
    add("--quick", action="store_true", help="under two minutes on two cores")
    add("--worst", action="store_true", help="lowest share of its ceiling first")
    add("--pictures", type=Path, metavar="DIR", help="draw the roofline, and time against context")
    add("--draw", type=Path, metavar="FILE", help="draw a result file instead of measuring")
    add("--compare", type=Path, nargs=2, metavar="FILE", help="what became slower from A to B")
    add("--json", type=Path, metavar="FILE", help="write JSON Lines")
    return parser


def _cases(
    options: argparse.Namespace, device: torch.device, parser: arguments.Parser
) -> list[Case]:
    """Fill the options that were left open, and return the rows to measure."""
    for name in options.only or ():
        if name not in OPS:
            parser.error(f"--only: expected one of {', '.join(OPS)}, got '{name}'")
    defaults = {**DEFAULTS[device.type, options.quick], **THOROUGH[options.quick]}
    for name, value in {**defaults, "dtype": ["bf16"], "collect": ["scores", "logits"]}.items():
        setattr(options, name, getattr(options, name) or value)
    options.budget = options.budget or (0.3 if options.quick else 2.0)
    options.peers = tuple(options.peers)
    axes = Axes(
        [SHAPES[name] for name in options.shape],
        options.dtype,
        options.batch,
        options.context,
        options.rows,
        options.page_size,
        options.sparsity,
        [kind for kind in options.collect if kind != "off"],
    )
    cases = [case for case in sweep(axes) if not options.only or case.op in options.only]
    free = free_memory(device)
    fitting = [case for case in cases if memory_needed(case, device) < 0.9 * free]
    if large := len(cases) - len(fitting):
        needed = max(memory_needed(case, device) for case in cases)
        print(
            f"{large} of {len(cases)} rows left out: they need up to {needed / 2**30:.0f} GiB, "
            f"{free / 2**30:.0f} are free",
            file=sys.stderr,
        )
    return fitting


def _backend(name: str):
    return nullcontext() if name == "auto" else specattn.use_backend(name)


def _heading(machine: dict, backend: str, ceilings: Ceilings, missing: dict[str, str]) -> str:
    rates = ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in ceilings.matrix.items())
    absent = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
    return (
        f"{machine['machine']['name']} | commit {machine['commit']} | "
        f"torch {machine['versions']['torch']} | backend {backend}\n"
        f"read {ceilings.read / 1e9:.1f} GB/s ({ceilings.read_method}), "
        f"copy {ceilings.copy / 1e9:.1f} GB/s (read plus written), "
        f"matrix products {rates} TFLOP/s, smallest call {ceilings.call * 1e6:.1f} us\n"
        f"missing peers: {absent or 'none'}"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Measure every primitive on this machine, against its memory bandwidth and against torch.

    python bench/run_kernels.py --quick
    python bench/run_kernels.py --only hybrid_tree_attention --context 8k,32k --rows 1,16 --worst
    python bench/run_kernels.py --bars
    python bench/run_kernels.py --emulate sm_90 --context 8k,32k --rows 1,16
    python bench/run_kernels.py --compare before.jsonl after.jsonl

`docs/benchmarks.md` says how to read the table, `bench/README.md` names every JSON field.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import arguments, comparison
from common.clock import Stopwatch
from common.machine import DISTURBING, describe, disturbed, free_memory, heading, serving
from common.records import Record, RecordFile, of_kind
from common.tables import Progress
from kernels import peers, pictures, report
from kernels.cases import DTYPES, Axes, Case
from kernels.ceilings import measure as measure_ceilings
from kernels.measure import WRONG, measure, memory_needed
from kernels.peers import FAMILIES, QUICK
from kernels.workloads import OPS, SPARSITY, sweep

import specattn
from specattn.machine_load import Others
from specattn.planning import MODELS
from specattn.planning.machines import SCHEMA

# What is swept when the command line does not say: thorough and quick, per device and on all.
DEFAULTS: dict[bool, dict[str, dict[str, Any]]] = {
    False: {
        "cpu": {"context": [8192, 32768], "rows": [1, 4, 8, 16, 32, 64, 69], "batch": [1]},
        "cuda": {"context": [32768, 131072], "rows": [1, 8, 16, 64], "batch": [1, 8]},
        "all": {"shape": ["llama-3.1-8b", "tiny"], "page_size": [1, 16, 64]}
        | {"sparsity": [0.03, SPARSITY, 0.2], "peers": list(FAMILIES), "budget": 2.0},
    },
    True: {
        "cpu": {"context": [2048, 16384], "rows": [1, 16], "batch": [1]},
        "cuda": {"context": [32768], "rows": [1, 16], "batch": [1]},
        "all": {"shape": ["llama-3.1-8b"], "page_size": [16]}
        | {"sparsity": [SPARSITY], "peers": list(QUICK), "budget": 0.3},
    },
}


def main(argv: list[str] | None = None) -> int:
    """Run the sweep; return 0 when all is right, 1 for a fault, 2 for bad arguments, 130 cut."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.bars:
        return _bars(options, parser)
    if options.emulate:
        return _emulate(options, parser)
    if options.compare:
        with parser.refusing("--compare: "):
            return comparison.show(*options.compare)
    if options.draw:
        with parser.refusing("--draw: "):
            run, found = comparison.read(options.draw)
        return int(not _pictures(run, of_kind(found.values(), "row"), options))
    device = arguments.device(options.device, parser)
    cases = _cases(options, device, parser)
    backend = nullcontext()
    with parser.refusing():
        if options.backend != "auto":
            backend = specattn.use_backend(options.backend)
        file = RecordFile(options.json)
    with backend:
        ceilings = measure_ceilings(device, options.dtype, seconds=0.5 if options.quick else 2.0)
        head = _begin(
            file,
            describe(device)
            | {
                "backend": options.backend if options.backend != "auto" else serving(device),
                "ceilings": ceilings.as_json(),
                "missing": peers.missing(device, options.peers),
            },
        )
        print(_heading(head))
        stopwatch, others, progress = Stopwatch(device), Others(), Progress(len(cases))
        with torch.inference_mode(), suppress(KeyboardInterrupt):
            for case in cases:
                progress.show(f"{case.op} {case.variant}")
                row = measure(case, stopwatch, ceilings, options.budget, options.peers)
                file.add({**row, "others": others.cores()})
    rows = file.rows
    if options.pictures:
        _pictures(head, rows, options)
    if options.worst:
        rows.sort(key=lambda row: row["share"] or 0.0)
    print(report.table(rows))
    faults = [row for row in rows if row["fault"]]
    if options.backend != "auto":  # which need not serve everything
        declined = [row for row in faults if "no backend serves" in row["fault"]]
        faults = [row for row in faults if row not in declined]
        print(f"{len(declined)} of {len(rows)} rows are not served by {options.backend}")
    for row in faults:
        print(f"{row['op']} {row['variant']}: {row['fault']}", file=sys.stderr)
    if text := disturbed(rows):
        print(text)
    if len(rows) < len(cases):
        print(f"interrupted: {len(rows)} of {len(cases)} rows", file=sys.stderr)
        return 130
    return int(bool(faults))


def _begin(file: RecordFile, machine: Record) -> Record:
    """Write the line that describes the run."""
    file.add({"kind": "run", "schema": SCHEMA, **machine})
    return file.records[0]


def _bars(options: argparse.Namespace, parser: arguments.Parser) -> int:
    """Measure what the CPU kernels have to reach; return 1 when an output was wrong."""
    if specattn.backends()["cpu"] != "available":
        parser.error(f"--bars: {specattn.backends()['cpu']}")
    from kernels import bars  # needs the compiled kernels

    for name in options.only or ():
        if not any(key.startswith(name) for key in bars.SUITE):
            parser.error(f"--only: expected the beginning of {', '.join(bars.SUITE)}, got '{name}'")
    with parser.refusing():
        file = RecordFile(options.json)
    run, others, wrong = _begin(file, describe(torch.device("cpu"))), Others(), False
    print(f"{heading(run)} | {bars.THREADS} threads")
    with torch.inference_mode():
        for bar in bars.measure(options.only or [], options.budget or 1.0):
            busy = others.cores()
            file.add({"kind": "bar", **asdict(bar), "met": bar.met, "others": busy})
            print(report.bar(bar, disturbed=(busy or 0) > DISTURBING), flush=True)
            wrong = wrong or bar.note == WRONG
    return int(wrong)


def _emulate(options: argparse.Namespace, parser: arguments.Parser) -> int:
    """Print what the GPU kernels would do, from blocks executed in the emulator; return 0."""
    if os.environ.get("TRITON_INTERPRET"):
        parser.error("--emulate: expected TRITON_INTERPRET not to be set")
    if options.backend not in ("auto", "triton", "cuda"):
        parser.error(f"--emulate: expected --backend triton or cuda, got {options.backend}")
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1]))  # where tools/ lies
    from tools.ptx import prediction  # needs Triton

    with parser.refusing():
        file = RecordFile(options.json)
    _begin(file, describe(torch.device("cpu")))
    backend = "triton" if options.backend == "auto" else options.backend
    sizes = options.context or [8192, 32768], options.rows or [1, 16]
    prediction.report(options.emulate, *sizes, backend, options.only, file.add)
    return 0


def _pictures(run: Record, rows: list[Record], options: argparse.Namespace) -> bool:
    """Draw what was measured, if it can be; a missing library must not cost the figures."""
    try:
        for path in pictures.draw(run, rows, options.pictures or options.draw.parent):
            print(path)
    except (ImportError, OSError) as failure:
        print(f"no pictures: {failure}", file=sys.stderr)
        return False
    return True


def _parser() -> arguments.Parser:
    parser = arguments.Parser(prog="run_kernels.py", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    emulated = "count what GPU kernels do (--backend triton or cuda)"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--backend", choices=("auto", *specattn.backends()), default="auto")
    add("--only", metavar="OP", action="append", help="one primitive, or bar; may be repeated")
    add("--bars", action="store_true", help="what the CPU kernels have to reach")
    add("--emulate", choices=("sm_80", "sm_90"), help=emulated)
    add("--shape", choices=MODELS, action="append", help="model shape; may be repeated")
    add("--context", type=arguments.numbers, metavar="N[,N]", help="cached tokens, such as 8k,32k")
    add("--rows", type=arguments.numbers, metavar="T[,T]", help="query rows per request")
    add("--batch", type=arguments.numbers, metavar="B[,B]", help="requests")
    add("--dtype", choices=DTYPES, action="append", help="default bf16; may be repeated")
    add("--page-size", type=arguments.numbers, metavar="N[,N]", help="tokens in a page")
    add("--sparsity", type=arguments.shares, metavar="P[,P]", help="selected share of the context")
    add("--collect", choices=("off", "scores", "logits"), action="append", help="of verification")
    add("--peers", choices=FAMILIES, metavar="NAME", action="append", help=", ".join(FAMILIES))
    add(
        "--variant",
        metavar="NAME",
        action="append",
        help="of it alone; may be repeated; of one row a chain is `contiguous`",
    )
    add("--budget", type=arguments.positive, metavar="S", help="seconds for one row and peers")
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
    defaults = DEFAULTS[options.quick]
    for name, value in ({"dtype": ["bf16"]} | defaults["all"] | defaults[device.type]).items():
        setattr(options, name, getattr(options, name) or value)
    swept = ("dtype", "batch", "context", "rows", "page_size", "sparsity")
    axes = Axes(
        [MODELS[name] for name in options.shape],
        *(getattr(options, name) for name in swept),
        [kind for kind in options.collect or Axes.collect if kind != "off"],
    )
    cases = [case for case in sweep(axes) if not options.only or case.op in options.only]
    variants = dict.fromkeys(case.variant for case in cases)
    for name in options.variant or ():
        if name not in variants:
            parser.error(f"--variant: expected one of {', '.join(variants)}, got '{name}'")
    wanted = options.variant or variants
    cases = [
        case for case in cases
        if case.variant in wanted
        or ("chain" in wanted and (case.variant, case.rows) == ("contiguous", 1))
    ]  # fmt: skip
    free, needed = free_memory(device), [memory_needed(case, device) for case in cases]
    fitting = [case for case, size in zip(cases, needed, strict=True) if size < 0.9 * free]
    if large := len(cases) - len(fitting):
        print(
            f"{large} of {len(cases)} rows left out: they need up to {max(needed) / 2**30:.0f} GiB,"
            f" {free / 2**30:.0f} are free",
            file=sys.stderr,
        )
    return fitting


def _heading(run: Record) -> str:
    ceilings = run["ceilings"]
    rates = ", ".join(f"{name} {rate / 1e12:.2f}" for name, rate in ceilings["matrix"].items())
    absent = "; ".join(f"{name}: {reason}" for name, reason in run["missing"].items())
    return (
        f"{heading(run)}\n"
        f"read {ceilings['read'] / 1e9:.1f} GB/s ({ceilings['read_method']}), "
        f"copy {ceilings['copy'] / 1e9:.1f} GB/s (read plus written), "
        f"matrix products {rates} TFLOP/s, smallest call {ceilings['call'] * 1e6:.1f} us\n"
        f"missing peers: {absent or 'none'}"
    )


if __name__ == "__main__":
    sys.exit(main())

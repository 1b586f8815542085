"""``specattn plan``: which method and settings should win on a machine, and why."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specattn.choices import unknown
from specattn.cli.errors import one_of
from specattn.cli.options import DTYPES, option, takes_options
from specattn.cli.table import aligned, fitting
from specattn.cli.terminal import preload, room, write_line

if TYPE_CHECKING:
    from specattn.planning import Prediction, Workload


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """A machine, a model and what it serves."""

    shape: str = option(
        "qwen3-8b", "Model: a known name, or a folder in Hugging Face layout.", metavar="NAME|DIR"
    )
    gpu: str = option(
        "h100",
        "Known name, or a file that run_kernels.py --json wrote.",
        "--gpu",
        "--machine",
        metavar="NAME|FILE",
    )
    context: int = option(131072, "Cached tokens of each request.", min=1, max=2**31 - 1)
    batch: int = option(1, "Requests decoded together.", min=1, max=2**31 - 1)
    dtype: str = option("bf16", "bf16, fp16 or fp32.")
    launch: str | None = option(
        None, "eager, or graph: replayed [default: as passes are here, on a GPU graph]."
    )
    ranks: int = option(1, "Machines over which the cache is sharded.", min=1, max=2**31 - 1)
    link: str = option("nvlink", "What connects them: nvlink, pcie, ib or ethernet.")
    acceptance: list[str] | None = option(None, "Rates by position, as vegas=0.95; repeatable.")
    validate: list[Path] | None = option(None, "File of results to hold it against; repeatable.")


@takes_options
def plan(options: PlanOptions) -> None:
    """Predict times of plain decoding, Vegas, LongSpec, PosS and TokenSwift, and which should win.

    Nothing is run: the figures follow from bytes, operations, bandwidths and acceptance.
    """
    preload("specattn.planning")
    from specattn import planning
    from specattn.planning.validate import compared

    shorts = {full: short for short, full in DTYPES.items()}
    dtype = one_of("--dtype", shorts.get(options.dtype, options.dtype), DTYPES)
    one_of("--launch", options.launch or "graph", ("eager", "graph"))
    link = planning.LINKS[one_of("--link", options.link, planning.LINKS)]
    profiles = dict(planning.METHOD_PROFILES)
    for text in options.acceptance or ():
        profiles |= planning.method_profile(text)
    machine = planning.MACHINES.get(options.gpu)
    if machine is None:
        if not Path(options.gpu).is_file():
            known = [*planning.MACHINES, "a file"]
            raise ValueError(f"--gpu: {unknown(options.gpu, known)}")
        machine = planning.Machine.from_results(Path(options.gpu), dtype)
    model = planning.ModelShape.named(options.shape)
    for path in options.validate or ():
        for line in compared(path, machine):
            write_line(line)
    if options.validate:
        return
    eager = options.launch == "eager" or (options.launch is None and not machine.overlaps)
    width = 4 if dtype == "fp32" else 2
    workload = planning.Workload(
        model, machine, options.context, options.batch, width, eager, options.ranks, link
    )
    _print_plan(workload, planning.predict(workload, profiles), profiles)


def _print_plan(workload: Workload, found: list[Prediction], profiles: dict) -> None:
    from specattn.planning.predict import reasons

    machine = workload.machine
    launched = "launched eagerly" if workload.eager else "replayed from graphs"
    write_line(
        f"{workload.model.name} on {machine.name}, {workload.context} cached tokens, "
        f"batch {workload.batch}, {launched}; PREDICTED, not measured"
    )
    ceilings = f"{machine.bandwidth / 1e12:.3g} TB/s, {machine.matrix / 1e12:.3g} TFLOP/s"
    write_line(f"{ceilings} ({machine.source})")
    if workload.ranks > 1:
        link = f"{workload.link.name} ({workload.link.source})"
        write_line(f"{workload.ranks} ranks, a share of the cache on each: {link}")
    if machine.memory and workload.stored > machine.memory:
        write_line(
            f"DOES NOT FIT: weights and caches take {workload.stored / 1e9:.0f} GB, a machine "
            f"has {machine.memory / 1e9:.0f}; shown as if they did."
        )
    rows = [
        {
            "method": one.method,
            "settings": one.settings,
            "round": f"{one.round.total * 1e3:.2f} ms",
            "tokens/round": f"{one.tokens:.2f}",
            "pays from": f"{one.break_even:.2f}",
            "tokens/s": f"{workload.batch * one.tokens / one.round.total:.1f}",
            "speedup": f"{one.speedup:.2f}x",
        }
        for one in found
    ]
    rows = fitting(rows, ("pays from", "round", "settings"), room(sys.stdout))
    for number, line in enumerate(aligned(rows, left=1 + ("settings" in rows[0]))):
        write_line(line, "bold" if number < 2 else None)  # the names, and the fastest
    plain = next(one for one in found if one.method == "plain")
    for line in reasons(workload, found[0], plain):
        write_line(line)
    for one in found:
        if one.method in profiles:
            write_line(f"Acceptance of {one.method}: {profiles[one.method].source}.")

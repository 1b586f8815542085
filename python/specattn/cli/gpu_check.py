"""``specattn gpu-check``: what runs first on a GPU: are the kernels right there, and how fast."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from specattn.cli.errors import one_of
from specattn.cli.options import option, takes_options
from specattn.cli.table import key_values
from specattn.cli.terminal import preload, write_line
from specattn.machine import facts


@dataclass(frozen=True, kw_only=True)
class GpuCheckOptions:
    """Which GPU, and how much of it."""

    device: int = option(0, "Number of the GPU.", min=0)
    only: str | None = option(None, "Check one primitive, by its name.", metavar="PRIMITIVE")
    times: bool = option(True, "Measure times, once all is right.", "--times/--no-times")
    budget: int = option(150, "Seconds that the checks may take.", min=1)


@takes_options
def gpu_check(options: GpuCheckOptions) -> None:
    """Hold every kernel against float64 on this GPU, then time attention beside other libraries.

    Exit code 0: all that backends serve is right. The output is a report to paste into an issue.
    From then on kernels in CUDA C++ and Gluon that passed are preferred on such GPUs.
    """
    preload("specattn.ops")
    import torch

    from specattn.gpu_checks import report
    from specattn.gpu_checks.cases import CASES

    if options.only:
        one_of("--only", options.only, dict.fromkeys(case.op for case in CASES))
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = f"built for {built}" if built else "built without CUDA"
        raise ValueError(
            f"gpu-check: torch {torch.__version__} ({why}) finds no GPU here; nothing was checked"
        )
    if options.device >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"--device: expected 0 to {count - 1}, got {options.device}")
    for line in key_values(facts()):
        write_line(line)
    found = report.checked(options.device, options.only, options.budget, write_line)
    if not options.only:
        write_line(report.note(found, torch.cuda.get_device_capability(options.device)))
    wrong = report.wrong(found)
    if options.times and wrong:
        write_line("Times are not measured: first all has to be right.")
    elif options.times:
        for line in report.timed(options.device, found):
            write_line(line)
    if not found or any(verdict.state not in ("right", "declined") for verdict in found):
        raise typer.Exit(1)

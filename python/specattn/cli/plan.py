"""``specattn plan``: which method and settings should win on a machine, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specattn.cli.errors import one_line_errors
from specattn.cli.options import DTYPES

if TYPE_CHECKING:
    from specattn.planning import Check, Machine, Prediction, Workload


def plan(
    shape: Annotated[
        str, typer.Option(help="Model: a known name, or a Hugging Face directory.")
    ] = "qwen3-8b",
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu", "--machine", help="Known name, or a file that run_kernels.py --json wrote."
        ),
    ] = "h100",
    context: Annotated[int, typer.Option(min=1, help="Cached tokens of each request.")] = 131072,
    batch: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 1,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    launch: Annotated[
        str, typer.Option(help="eager, as this package's loop does, or graph: no host time.")
    ] = "eager",
    ranks: Annotated[
        int, typer.Option(min=1, help="Machines over which the cache is dealt out.")
    ] = 1,
    link: Annotated[
        str, typer.Option(help="What connects them: nvlink, pcie, ib or ethernet.")
    ] = "nvlink",
    acceptance: Annotated[
        list[str] | None,
        typer.Option(help="Rates per position given all before, as vegas=0.95; may be repeated."),
    ] = None,
    validate: Annotated[
        list[Path] | None,
        typer.Option(help="Result file to hold the model against; may be repeated."),
    ] = None,
) -> None:
    """Predict the time of a round of every method, and which should win.

    Nothing is run: the figures follow from bytes, operations, bandwidths and acceptance.
    """
    from specattn.planning import (
        LINKS,
        MACHINES,
        METHOD_PROFILES,
        ModelShape,
        Workload,
        method_profile,
        predict,
    )

    dtype = next((short for short, full in DTYPES.items() if dtype == full), dtype)
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if launch not in ("eager", "graph"):
        raise typer.BadParameter(f"--launch: expected eager or graph, got {launch!r}")
    if link not in LINKS:
        raise typer.BadParameter(f"--link: expected one of {', '.join(LINKS)}, got {link!r}")
    with one_line_errors():
        profiles = dict(METHOD_PROFILES)
        for text in acceptance or ():
            profiles |= method_profile(text)
        machine = MACHINES.get(gpu) or _measured(gpu, dtype)
        model = ModelShape.named(shape)
        for path in validate or ():
            _print_checks(path, machine)
    if validate:
        return
    width = 4 if dtype == "fp32" else 2
    workload = Workload(
        model, machine, context, batch, width, launch == "eager", ranks, LINKS[link]
    )
    _print_plan(workload, predict(workload, profiles), profiles)


def _measured(name: str, dtype: str) -> Machine:
    from specattn.planning import MACHINES, Machine

    if not Path(name).is_file():
        raise ValueError(f"--gpu: expected one of {', '.join(MACHINES)}, or a file, got {name!r}")
    return Machine.from_results(Path(name), dtype)


def _print_plan(workload: Workload, found: list[Prediction], profiles: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    from specattn.planning.predict import reasons

    machine = workload.machine
    launched = "launched eagerly" if workload.eager else "replayed from graphs"
    typer.echo(
        f"{workload.model.name} on {machine.name}, {workload.context} cached tokens, "
        f"batch {workload.batch}, {launched}; PREDICTED, not measured"
    )
    ceilings = f"{machine.bandwidth / 1e12:.3g} TB/s, {machine.matrix / 1e12:.3g} TFLOP/s"
    typer.echo(f"{ceilings} ({machine.source})")
    if workload.ranks > 1:
        typer.echo(
            f"{workload.ranks} ranks, a share of the cache on each: {workload.link.name} "
            f"({workload.link.source})"
        )
    if machine.memory and workload.stored > machine.memory:
        typer.echo(
            f"DOES NOT FIT: weights and caches take {workload.stored / 1e9:.0f} GB, a machine "
            f"has {machine.memory / 1e9:.0f}; shown as if they did."
        )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("method", "settings", "round", "tokens/round", "pays from", "tokens/s", "speedup"):
        left = name in ("method", "settings")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for one in found:
        table.add_row(
            one.method,
            one.settings,
            f"{one.round.total * 1e3:.2f} ms",
            f"{one.tokens:.2f}",
            f"{one.break_even:.2f}",
            f"{workload.batch * one.tokens / one.round.total:.1f}",
            f"{one.speedup:.2f}x",
            style="bold" if one is found[0] else None,
        )
    Console(highlight=False, width=110).print(table)
    plain = next(one for one in found if one.method == "plain")
    for line in reasons(workload, found[0], plain):
        typer.echo(line)
    for one in found:
        if one.method in profiles:
            typer.echo(f"Acceptance of {one.method}: {profiles[one.method].source}.")


def _print_checks(path: Path, machine: Machine) -> None:
    from specattn.planning import checks
    from specattn.planning.validate import errors

    found = checks(path, machine)
    typer.echo(f"{path}, predicted for {machine.name}")
    for one in sorted(found, key=lambda check: -abs(check.error)):
        typer.echo(_line(one))
    median, worst = errors(found)
    count = sum(not one.calibrated for one in found)
    typer.echo(f"{count} rows predicted: median error {median:.0%}, largest {worst:.0%}")


def _line(check: Check) -> str:
    note = "  (calibrated on this row)" if check.calibrated else ""
    return (
        f"{check.error:+6.0%}  {check.predicted:10.3f} {check.measured:10.3f} {check.unit:9}"
        f"{check.name}{note}"
    )

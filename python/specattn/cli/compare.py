"""``specattn compare``: continue files with several methods."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specattn.cli.errors import one_line_errors
from specattn.cli.interrupts import Interrupted
from specattn.cli.options import DecodingOptions, JsonOption, with_options
from specattn.cli.output import STDOUT, check_outputs, write_json

if TYPE_CHECKING:
    from specattn.cli.differences import Difference
    from specattn.cli.session import Continuation, DecodingSession
    from specattn.decoding import Method

SCHEMA = "specattn.compare/1"

Runs = dict[str, "list[Continuation]"]  # by what --methods calls them


@with_options
def compare(
    options: DecodingOptions,
    methods: Annotated[
        str,
        typer.Option(
            help="As --method of generate; a comma and a method's name begin the next. "
            "`specattn methods` lists them."
        ),
    ] = "plain,auto",
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each method, in turn; figures are of the median.")
    ] = 1,
    json_file: JsonOption = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page here: texts in colours, rounds, acceptance, memory."),
    ] = None,
) -> None:
    """Continue files with several methods, in turn, and print their figures side by side."""
    with one_line_errors():
        from specattn.cli.load import OtherLoad, warning
        from specattn.cli.page import Comparison, write_page
        from specattn.cli.session import DecodingSession, build_method
        from specattn.cli.table import print_figures
        from specattn.cli.terminal import console
        from specattn.decoding.methods import split_methods
        from specattn.distributed.launch import refuse_ranks

        refuse_ranks("specattn compare")
        check_outputs(json=json_file, html=html)
        if html == STDOUT:
            raise ValueError("--html: expected a file, got -")
        if html is not None and json_file is not None and html.resolve() == json_file.resolve():
            raise ValueError(f"--html: {html} is the file of --json too")
        chosen = {text: build_method(text, "--methods") for text in split_methods(methods)}
        if not chosen:
            raise ValueError("--methods: expected at least one, got none")
        session = DecodingSession(options, silent=json_file == STDOUT)
        prepared = {text: method.prepared(session.model) for text, method in chosen.items()}
        load = OtherLoad()
        runs, stopped = _run(session, prepared, repeats)
        medians = {text: _median(found) for text, found in runs.items()}
        console.rule()
        if medians:
            print_figures(session, medians)
        lines = list[str]()
        if (line := warning(load)) is not None:
            console.print(line, style="yellow", soft_wrap=True)
            lines.append(line)
        alike = _comparable(options.temperature, chosen) if stopped is None else []
        parted = _judge(session, {text: medians[text] for text in alike}, lines) if alike else {}
        if stopped is None and (left := [text for text in chosen if text not in alike]):
            line = f"Not judged, for drafts that are sampled by themselves: {', '.join(left)}"
            console.print(line, soft_wrap=True, markup=False)
            lines.append(line)
        identical = not parted if alike else None
        if html is not None:
            write_page(Comparison(session, medians, identical, lines), html)
        if json_file is not None:
            written = [
                {
                    "method": {"name": text.partition(":")[0], **vars(chosen[text])},
                    **one.to_dict(),
                    "tokens_per_second": [run.statistics.tokens_per_second for run in runs[text]],
                    "difference": parted[text].to_dict() if text in parted else None,
                }
                for text, one in medians.items()
            ]
            content = {**session.to_dict(), "identical": identical}
            content |= {"others_share": load.share(), "runs": written}
            write_json({"schema": SCHEMA, **content}, json_file)
    if stopped is not None:
        console.print(f"Interrupted; {len(runs)} of {len(prepared)} methods have run.")
        raise typer.Exit(stopped)


def _run(
    session: DecodingSession, methods: dict[str, Method], repeats: int
) -> tuple[Runs, int | None]:
    """Run every method `repeats` times, in turn, there and back; show each text once.

    Returns the runs, and the exit code if a signal has ended them.
    """
    from rich.markup import escape

    from specattn.cli.terminal import console

    runs: Runs = {}
    silent = session.silent
    for turn in range(repeats):
        session.silent = silent or turn > 0
        for text in reversed(methods) if turn % 2 else methods:
            if turn == 0:
                console.rule(f"[bold]{escape(text)}", align="left")
            try:
                found = session.decode(methods[text], session.begin())
            except Interrupted as stop:
                return runs, stop.exit_code
            if turn == 0 or found.signal is None:
                runs.setdefault(text, []).append(found)
            if found.signal is not None:
                return runs, 128 + found.signal
    return runs, None


def _median(runs: list[Continuation]) -> Continuation:
    """Return the run of median speed, the slower of two in the middle."""
    ordered = sorted(runs, key=lambda run: run.statistics.tokens_per_second)
    return ordered[(len(ordered) - 1) // 2]


def _comparable(temperature: float, methods: dict[str, Method]) -> list[str]:
    """Return the methods whose texts must be the same, if there are two of them.

    Above temperature 0 those that sample drafts by themselves emit texts of their own.
    """
    drawn = [
        text
        for text, method in methods.items()
        if temperature == 0 or not getattr(method, "rejection", False)
    ]
    return drawn if len(drawn) > 1 or len(drawn) == len(methods) else []


def _judge(
    session: DecodingSession, found: dict[str, Continuation], lines: list[str]
) -> dict[str, Difference]:
    """Say whether all texts are those of the first method; return where they are not.

    What is said of each goes into `lines` too.
    """
    from specattn.cli.differences import describe, first_difference
    from specattn.cli.terminal import console

    first, expected = next(iter(found.items()))
    parted = {}
    for text, one in found.items():
        if (difference := first_difference(session, expected, one)) is not None:
            parted[text] = difference
            line = describe(session, difference, first, text)
            lines.append(line)
            console.print(line, soft_wrap=True, markup=False)
    verdict = "[bold red]no" if parted else "[bold green]yes"
    console.print(f"Outputs identical, token for token: {verdict}")
    return parted

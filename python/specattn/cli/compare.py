"""``specattn compare``: continue files with several methods."""

from __future__ import annotations

from typing import Annotated

import typer

from specattn.cli.errors import one_line_errors
from specattn.cli.interrupts import Interrupted
from specattn.cli.options import DecodingOptions, JsonOption, with_options
from specattn.cli.output import STDOUT, check_outputs, write_json

SCHEMA = "specattn.compare/1"


@with_options
def compare(
    options: DecodingOptions,
    methods: Annotated[
        str,
        typer.Option(
            help="As --method of generate; a comma and a method's name begin the next. "
            "`specattn methods` lists them."
        ),
    ] = "plain,vegas",
    json_file: JsonOption = None,
) -> None:
    """Continue files with several methods, one after the other, and print them side by side."""
    with one_line_errors():
        from rich.markup import escape

        from specattn.cli.differences import Difference, describe, first_difference
        from specattn.cli.session import Continuation, DecodingSession, build_method
        from specattn.cli.table import print_figures
        from specattn.cli.terminal import console
        from specattn.decoding.methods import split_methods

        check_outputs(json=json_file)
        chosen = {text: build_method(text, "--methods") for text in split_methods(methods)}
        if not chosen:
            raise ValueError("--methods: expected at least one, got none")
        session = DecodingSession(options, silent=json_file == STDOUT)
        prepared = {text: method.prepared(session.model) for text, method in chosen.items()}
        continuations: dict[str, Continuation] = {}
        stopped: int | None = None
        for text, method in prepared.items():
            console.rule(f"[bold]{escape(text)}", align="left")
            try:
                continuations[text] = session.decode(method, session.begin())
            except Interrupted as stop:
                stopped = stop.exit_code
                break
            if (number := continuations[text].signal) is not None:
                stopped = 128 + number
                break
        console.rule()
        if continuations:
            print_figures(session, continuations)
        parted: dict[str, Difference] = {}
        judged = stopped is None and options.temperature == 0
        if judged:
            first, expected = next(iter(continuations.items()))
            for text, one in continuations.items():
                if (difference := first_difference(session, expected, one)) is not None:
                    parted[text] = difference
                    line = describe(session, difference, first, text)
                    console.print(line, soft_wrap=True, markup=False)
            verdict = "[bold red]no" if parted else "[bold green]yes"
            console.print(f"Outputs identical, token for token: {verdict}")
        if json_file is not None:
            runs = [
                {
                    "method": {"name": text.partition(":")[0], **vars(chosen[text])},
                    **one.to_dict(),
                    "difference": parted[text].to_dict() if text in parted else None,
                }
                for text, one in continuations.items()
            ]
            content = {**session.to_dict(), "identical": not parted if judged else None}
            write_json({"schema": SCHEMA, **content, "runs": runs}, json_file)
    if stopped is not None:
        console.print(f"Interrupted; {len(continuations)} of {len(prepared)} methods have run.")
        raise typer.Exit(stopped)

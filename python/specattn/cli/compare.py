"""``specattn compare``: continue a file with several methods."""

from __future__ import annotations

from typing import Annotated

import typer

from specattn.cli.errors import one_line_errors
from specattn.cli.options import DecodingOptions, with_options


@with_options
def compare(
    options: DecodingOptions,
    methods: Annotated[
        str,
        typer.Option(help="As --method of generate; a comma and a method's name begin the next."),
    ] = "plain,vegas",
) -> None:
    """Continue a file with several methods, one after the other, and print them side by side."""
    with one_line_errors():
        from specattn.cli.session import DecodingSession, build_method
        from specattn.cli.table import print_figures
        from specattn.cli.terminal import console
        from specattn.decoding.methods import split_methods

        chosen = {text: build_method(text, "--methods") for text in split_methods(methods)}
        session = DecodingSession(options)
        prepared = {text: method.prepared(session.model) for text, method in chosen.items()}
    continuations = {}
    for text, method in prepared.items():
        console.rule(f"[bold]{text}", align="left")
        continuations[text] = session.decode(method, session.begin())
    console.rule()
    print_figures(session, continuations)
    if options.temperature == 0:
        same = len({tuple(one.new_tokens) for one in continuations.values()}) == 1
        verdict = "[bold green]yes" if same else "[bold red]no"
        console.print(f"Outputs identical, token for token: {verdict}")

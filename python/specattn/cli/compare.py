"""``specattn compare``: continue files with several methods."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from specattn.cli.errors import Interrupted, one_of
from specattn.cli.options import METHOD_HELP, DecodingOptions, grouped, takes_options
from specattn.cli.output import STDOUT, check_outputs, write_json
from specattn.cli.prompts import read_texts
from specattn.cli.table import print_figures
from specattn.cli.terminal import console, preload, say
from specattn.machine_load import Others
from specattn.method_names import method_names, split_methods

if TYPE_CHECKING:
    from specattn.cli.session import Continuation, DecodingSession
    from specattn.decoding import Method

SCHEMA = "specattn.compare/1"
NOTICED = 0.1  # share of the processors that others use, from which on times say little

_method, _output = grouped("Method"), grouped("Output")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(DecodingOptions):
    """What to continue, by which methods."""

    methods: list[str] = _method(
        ("plain", "auto"),
        f"Repeatable, or plain,auto: {METHOD_HELP}",
        "--method",
        "--methods",
        metavar="METHOD",
    )
    repeats: int = _method(1, "Runs of each method, in turn; figures are of the median.", min=1)
    html: Path | None = _output(None, "Write a page here: texts, rounds, acceptance, memory.")


@takes_options
def compare(options: CompareOptions) -> None:
    """Continue a text with several methods, in turn, and print their figures side by side."""
    out, html = options.json_file, options.html
    check_outputs(json=out, html=html)
    if html == STDOUT:
        raise ValueError("--html: expected a file, got -")
    given = [text for several in options.methods for text in split_methods(several)]
    if not given:
        raise ValueError("--method: expected at least one, got none")
    for text in given:
        one_of("--method", text.partition(":")[0], method_names())
    texts = read_texts(options)  # first, for what is imported next takes seconds
    preload("specattn.cli.session")
    from specattn.cli.differences import describe, first_difference
    from specattn.cli.page import write_page
    from specattn.cli.session import DecodingSession, build_method
    from specattn.distributed.launch import refuse_ranks

    refuse_ranks("specattn compare")
    chosen = {text: build_method(text) for text in given}
    session = DecodingSession(options, texts, silent=out == STDOUT)
    prepared = {text: method.prepared(session.model) for text, method in chosen.items()}
    others = Others()
    runs, stopped = _run(session, prepared, options.repeats)
    medians = {text: _median(found) for text, found in runs.items()}
    for first, (expected, *_) in runs.items():
        alike = [text for text, (one, *_) in runs.items() if one.tokens == expected.tokens]
        if alike[0] == first and len(alike) > 1 and not session.silent:
            say(f"The same text, shown once: {', '.join(alike)}")
    console.rule()
    if medians:
        print_figures(session, medians)
    judged = _judged(options.temperature, chosen) if stopped is None else []
    parted = {
        text: difference
        for text in judged
        if (difference := first_difference(session, medians[judged[0]], medians[text])) is not None
    }
    lines = [describe(session, one, judged[0], text) for text, one in parted.items()]
    if stopped is None and (left := [text for text in chosen if text not in judged]):
        lines.append(f"Not judged, for drafts that are sampled by themselves: {', '.join(left)}")
    share = None if (cores := others.cores()) is None else cores / (os.cpu_count() or 1)
    if share is not None and share > NOTICED:
        used = f"other programs used {share:.0%} of the processors meanwhile"
        lines.append(f"warning: {used}; times say little")
    for line in lines:
        say(line)
    identical = not parted if judged else None
    if judged:
        verdict = "[bold red]no" if parted else "[bold green]yes"
        console.print(f"Outputs identical, token for token: {verdict}")
    if html is not None:
        write_page(html, session, medians, identical, lines)
    if out is not None:
        written = [
            {
                "method": {"name": text.partition(":")[0], **vars(chosen[text])},
                **one.to_dict(),
                "tokens_per_second": [run.statistics.tokens_per_second for run in runs[text]],
                "difference": parted[text].to_dict() if text in parted else None,
            }
            for text, one in medians.items()
        ]
        content = {**session.to_dict(), "identical": identical, "others_share": share}
        write_json({"schema": SCHEMA, **content, "runs": written}, out)
    if stopped is not None:
        say(f"Interrupted; {len(runs)} of {len(prepared)} methods have run.")
        raise typer.Exit(stopped)


def _run(
    session: DecodingSession, methods: dict[str, Method], repeats: int
) -> tuple[dict[str, list[Continuation]], int | None]:
    """Return runs of the methods, in turn, there and back, and the exit code if a signal came."""
    runs: dict[str, list[Continuation]] = {}
    for turn in range(repeats):
        for name in reversed(methods) if turn % 2 else methods:
            if not runs:
                _head(session, name)
            try:
                found = session.decode(methods[name], session.begin(), quiet=bool(runs))
            except Interrupted as stop:
                return runs, stop.exit_code
            if runs and all(found.tokens != one.tokens for one, *_ in runs.values()):
                _head(session, name)
                session.show(found)
            if turn == 0 or found.signal is None:
                runs.setdefault(name, []).append(found)
            if found.signal is not None:
                return runs, 128 + found.signal
    return runs, None


def _head(session: DecodingSession, name: str) -> None:
    """Print the method's name over its text, if that is printed."""
    if not session.silent:
        console.rule(f"[bold]{escape(name)}", align="left")


def _median(runs: list[Continuation]) -> Continuation:
    """Return the run of median speed, the slower of two in the middle."""
    return sorted(runs, key=lambda run: run.statistics.tokens_per_second)[(len(runs) - 1) // 2]


def _judged(temperature: float, methods: dict[str, Method]) -> list[str]:
    """Return the methods whose texts must be the same: not those that sample drafts themselves."""
    drawn = [
        text
        for text, method in methods.items()
        if temperature == 0 or not getattr(method, "rejection", False)
    ]
    return drawn if len(drawn) > 1 or len(drawn) == len(methods) else []

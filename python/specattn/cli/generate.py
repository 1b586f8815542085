"""``specattn generate``: continue files with one method."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specattn.cli.errors import one_line_errors
from specattn.cli.options import DecodingOptions, JsonOption, with_options
from specattn.cli.output import STDOUT, check_outputs, write_json

SCHEMA = "specattn.generate/1"


@with_options
def generate(
    options: DecodingOptions,
    method: Annotated[
        str,
        typer.Option(
            help="NAME or NAME:OPTION=VALUE,... such as vegas:gamma=4,ratio=0.05; auto takes "
            "whatever is fastest; "
            "`specattn methods` lists them."
        ),
    ] = "auto",
    explain: Annotated[
        bool, typer.Option("--explain", help="Say by which figures the method decided.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Colour the text's tokens by who drafted them.")
    ] = False,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            help="Look the text's end up in this file too, with auto and suffix; may be repeated."
        ),
    ] = None,
    json_file: JsonOption = None,
    state: Annotated[
        Path | None, typer.Option(help="Save the run here every 30 seconds, to go on with later.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run that --state saved here; save it again.")
    ] = None,
    context_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Deal the cache out over so many ranks, which torchrun starts "
            "(docs/distributed.md).",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Divide the model over so many ranks by transformers' plan; both kinds multiply.",
        ),
    ] = None,
    rank_timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a silent rank is given up.")
    ] = 300.0,
) -> None:
    """Continue files; the text goes to standard output, all else to standard error."""
    with one_line_errors(), ExitStack() as stack:
        from specattn.cli.authors import Authors
        from specattn.cli.session import DecodingSession, build_method
        from specattn.cli.table import print_figures
        from specattn.cli.terminal import console
        from specattn.decoding import Auto, Suffix

        check_outputs(json=json_file, state=state, resume=resume)
        if show and json_file == STDOUT:
            raise ValueError("--show: standard output is taken by --json -: give that a file")
        chosen = build_method(method, "--method")
        if corpus:
            if not isinstance(chosen, Auto | Suffix):
                raise ValueError(f"--corpus: expected --method auto or suffix, got {method}")
            chosen = replace(chosen, corpus=(*chosen.corpus, *corpus))
        started = None
        if context_parallel is not None or tensor_parallel is not None:
            from specattn.cli.loading import device_named
            from specattn.distributed.launch import torchrun_ranks

            on_gpu = device_named(options.device).type == "cuda"
            joined = torchrun_ranks(
                context_parallel or 1, tensor_parallel or 1, timeout=rank_timeout, on_gpu=on_gpu
            )
            started = stack.enter_context(joined)
        shown = started is None or started.ranks.rank == 0
        console.quiet = not shown
        session = DecodingSession(options, silent=json_file == STDOUT or not shown, started=started)
        runs = session.begin(resume or state, resume=resume is not None)
        done, wanted = len(runs[0].tokens), options.max_new_tokens
        if done >= wanted:
            raise ValueError(f"{runs[0].path} has {done} tokens, not fewer than {wanted}")
        authors = Authors(method.partition(":")[0]) if show else None
        continuation = session.decode(chosen.prepared(session.model), runs, authors)
        if shown:
            if authors is not None:
                console.print(authors.legend(continuation.authors(authors)), soft_wrap=True)
            print_figures(session, {method: continuation}, explain)
        if json_file is not None and shown:
            named = {"name": method.partition(":")[0], **vars(chosen)}
            content = {**session.to_dict(), "method": named, **continuation.to_dict()}
            write_json({"schema": SCHEMA, **content}, json_file)
    if continuation.signal is not None:
        made = " + ".join(str(len(text.new_tokens)) for text in continuation.texts)
        console.print(f"Interrupted after {made} of {wanted} tokens.")
        raise typer.Exit(128 + continuation.signal)

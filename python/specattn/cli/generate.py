"""``specattn generate``: continue a file with one method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from specattn.cli.errors import one_line_errors
from specattn.cli.options import DecodingOptions, with_options
from specattn.files import write_atomically

SCHEMA = "specattn.generate/1"


@with_options
def generate(
    options: DecodingOptions,
    method: Annotated[
        str, typer.Option(help="NAME or NAME:OPTION=VALUE,... such as vegas:gamma=4,ratio=0.05.")
    ] = "vegas",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write tokens, text and statistics here.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Save the run here every 30 seconds, to go on with later.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run that --state saved here; save it again.")
    ] = None,
) -> None:
    """Continue a file; the text goes to standard output, all else to standard error."""
    with one_line_errors():
        from specattn.cli.session import DecodingSession, build_method
        from specattn.cli.table import print_figures
        from specattn.cli.terminal import console

        for option, file in (("--json", json_file), ("--state", state), ("--resume", resume)):
            if file is not None and not file.absolute().parent.is_dir():
                raise ValueError(f"{option}: folder {file.absolute().parent} does not exist")
        chosen = build_method(method, "--method")
        session = DecodingSession(options)
        run = session.begin(resume or state, resume=resume is not None)
        done, wanted = len(run.tokens), options.max_new_tokens
        if done >= wanted:
            raise ValueError(f"{run.path} has {done} tokens, not fewer than {wanted}")
        prepared = chosen.prepared(session.model)
    continuation = session.decode(prepared, run)
    print_figures(session, {method: continuation})
    if json_file is not None:
        content = {
            "schema": SCHEMA,
            **session.to_dict(),
            "method": {"name": method.partition(":")[0], **vars(chosen)},
            "sampling": {
                "max_new_tokens": options.max_new_tokens,
                "min_new_tokens": options.min_new_tokens,
                **options.sampling,
            },
            **continuation.to_dict(),
        }
        text = json.dumps(content, indent=2, default=str) + "\n"
        write_atomically(json_file, lambda partial: partial.write_text(text, encoding="utf-8"))
    if continuation.finish_reason == "interrupted":
        console.print(f"Interrupted after {len(continuation.new_tokens)} of {wanted} tokens.")
        raise typer.Exit(130)

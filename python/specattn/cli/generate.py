"""``specattn generate``: continue texts with one method."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specattn.cli.errors import one_of
from specattn.cli.options import METHOD_HELP, DecodingOptions, grouped, takes_options
from specattn.cli.output import STDOUT, check_outputs, write_json
from specattn.cli.prompts import read_texts
from specattn.cli.table import print_figures
from specattn.cli.terminal import console, preload, say
from specattn.method_names import method_names
from specattn.pages.authors import Authors

if TYPE_CHECKING:
    from specattn.decoding import Method
    from specattn.distributed.launch import Started

SCHEMA = "specattn.generate/1"


_method, _output, _ranks = grouped("Method"), grouped("Output"), grouped("Ranks")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(DecodingOptions):
    """What to continue, by which method, on how many ranks."""

    method: str = _method("auto", METHOD_HELP, metavar="METHOD")
    corpus: list[Path] | None = _method(
        None, "With auto and suffix: a file in which the text's end is looked up. Repeatable."
    )
    show: bool = _output(False, "Colour the text's tokens by who drafted them.")
    state: Path | None = _output(None, "Save the run here every 30 seconds, to go on with later.")
    resume: Path | None = _output(
        None, "Go on with the run that --state saved here; save it again."
    )
    context_parallel: int | None = _ranks(None, "Ranks of torchrun that share the cache.", min=1)
    tensor_parallel: int | None = _ranks(
        None, "Ranks that share the model; both kinds multiply (docs/distributed.md).", min=1
    )
    rank_timeout: float = _ranks(300.0, "Seconds after which a silent rank is given up.", min=1.0)


@takes_options
def generate(options: GenerateOptions) -> None:
    """Continue a text. It goes to standard output, all else to standard error."""
    out, wanted = options.json_file, options.max_new_tokens
    check_outputs(json=out, state=options.state, resume=options.resume)
    if options.state and options.resume:
        raise ValueError("--resume saves the run again: leave out --state")
    if options.show and out == STDOUT:
        raise ValueError("--show: standard output is taken by --json -: give that a file")
    name = one_of("--method", options.method.partition(":")[0], method_names())
    texts = read_texts(options)  # first, for what is imported next takes seconds
    preload("specattn.cli.session")
    from specattn.cli.session import DecodingSession

    method = _built(options)
    with ExitStack() as stack:
        started = _join_ranks(options, stack)
        is_first = started is None or started.ranks.rank == 0
        console.quiet = not is_first
        silent = out == STDOUT or not is_first
        session = DecodingSession(options, texts, silent=silent, started=started)
        runs = session.begin(options.resume or options.state, resume=options.resume is not None)
        if (done := len(runs[0].tokens)) >= wanted:
            raise ValueError(f"{runs[0].path} has {done} tokens, not fewer than {wanted}")
        authors = Authors(name) if options.show else None
        found = session.decode(method.prepared(session.model), runs, authors)
        if is_first and authors is not None:
            console.print(authors.legend(found.authors(authors)), soft_wrap=True)
        if is_first:
            print_figures(session, {options.method: found})
        if is_first and out is not None:
            facts = {"method": {"name": name, **vars(method)}, **found.to_dict()}
            write_json({"schema": SCHEMA, **session.to_dict(), **facts}, out)
    if found.signal is not None:
        made = " + ".join(str(len(text.tokens)) for text in found.texts)
        say(f"Interrupted after {made} of {wanted} tokens.")
        raise typer.Exit(128 + found.signal)


def _built(options: GenerateOptions) -> Method:
    """Return the method that --method describes, with the files of --corpus."""
    from specattn.cli.session import build_method
    from specattn.decoding import Auto, Suffix

    method = build_method(options.method)
    if not options.corpus:
        return method
    if not isinstance(method, Auto | Suffix):
        raise ValueError(f"--corpus: expected --method auto or suffix, got {options.method}")
    return replace(method, corpus=(*method.corpus, *options.corpus))


def _join_ranks(options: GenerateOptions, stack: ExitStack) -> Started | None:
    """Join the ranks that torchrun has started, until the stack ends; None without any."""
    shares, parts = options.context_parallel, options.tensor_parallel
    if shares is None and parts is None:
        return None
    from specattn.cli.loading import device_named
    from specattn.distributed.launch import torchrun_ranks

    on_gpu = device_named(options.device).type == "cuda"
    joined = torchrun_ranks(shares or 1, parts or 1, timeout=options.rank_timeout, on_gpu=on_gpu)
    return stack.enter_context(joined)

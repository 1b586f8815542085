"""``specattn conform``: whether an engine that drafts writes what it writes without drafts."""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specattn.cli.errors import naming
from specattn.cli.options import option, takes_options
from specattn.cli.output import STDOUT, check_outputs, write_json
from specattn.cli.table import aligned, fitting
from specattn.cli.terminal import (
    console,
    output,
    preload,
    progress_bars,
    room,
    say,
    status,
    write_line,
)
from specattn.escaping import escaped

if TYPE_CHECKING:  # HTTP's client is for who asks a server, not for who reads the help
    from specattn.conform import Answer, Engine, Finding, Request

SCHEMA = "specattn.conform/1"


@dataclass(frozen=True, kw_only=True)
class ConformOptions:
    """What is asked, and where the report goes."""

    prompt_file: list[Path] | None = option(
        None,
        "UTF-8 text, or .jsonl with a 'prompt' in each line. Repeatable [default: 12 prompts].",
    )
    max_new_tokens: int = option(128, "Of each text.", min=1)
    temperature: float = option(0.0, "0 is greedy; above it, texts of one seed.", min=0.0)
    seed: int = option(0, "Of the sampling.", min=0, max=2**31 - 1)
    at_once: int = option(1, "Requests that an engine gets at the same time.", min=1)
    served: str | None = option(None, "The model's name at the servers [default: their first].")
    timeout: float = option(600.0, "Seconds that a server may take.", min=0.1)
    json_file: Path | None = option(None, "Write the report here; - is standard output.", "--json")
    html: Path | None = option(None, "Write a page here.")


@takes_options
def conform(
    plain: Annotated[
        str,
        typer.Argument(help="A server without drafts, or a checkpoint.", metavar="URL|DIR|HUB_ID"),
    ],
    drafting: Annotated[str, typer.Argument(help="A server that drafts.", metavar="URL")],
    options: ConformOptions,
) -> None:
    """Hold a server that drafts against one that does not: where do texts part, and why.

    Exit code 0: every text is the same or parts at a near-tie. 1: one is different, or of one
    nothing was compared.
    """
    from specattn.conform import Request, Verdict, judge, noise_of
    from specattn.conform.judge import BAD, notes_of

    check_outputs(json=options.json_file, html=options.html)
    output.outlives = True  # the exit code is the answer
    if options.html == STDOUT:
        raise ValueError("--html: expected a file, got -")
    prompts = _prompts(options.prompt_file)
    request = Request(options.max_new_tokens, options.temperature, options.seed)
    drafts = _engine("DRAFTING", drafting, options)  # first: weights are long to load
    engines = [_engine("PLAIN", plain, options), drafts]
    answers = [_answers(one, prompts, request, options.at_once) for one in engines]
    pairs = dict(zip(prompts, zip(*answers, strict=True), strict=True))
    noise = noise_of(pairs.values())
    sampled = options.temperature > 0
    findings = {
        name: judge(first, second, noise, sampled=sampled)
        for name, (first, second) in pairs.items()
    }
    counts = Counter(one.verdict for one in findings.values())
    places = sum(one.compared for one in findings.values())
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in Verdict)
    notes = notes_of(noise, places, pairs.values(), sampled=sampled)
    if options.json_file != STDOUT:
        rows = [_row(name, one) for name, one in findings.items()]
        for line in aligned(fitting(rows, ("why", "parts at"), room(sys.stdout)), left=5):
            write_line(line)
    for line in [*notes, summary]:
        say(line)
    content = {
        "schema": SCHEMA,
        "engines": [one.name for one in engines],
        "request": asdict(request) | {"at_once": options.at_once},
        "noise": noise,
        "places": places,
        "counts": {kind: counts[kind] for kind in Verdict},
        "prompts": [
            {"name": name, **asdict(findings[name]), "texts": [one.text for one in pair]}
            for name, pair in pairs.items()
        ],
    }
    if options.json_file is not None:
        write_json(content, options.json_file)
    if options.html is not None:
        from specattn.conform.page import write_page

        write_page(options.html, content, [*notes, summary])
    if any(counts[kind] for kind in BAD):
        raise typer.Exit(1)


def _prompts(given: list[Path] | None) -> dict[str, str]:
    """Return the prompts by name."""
    from specattn.conform.prompts import PROMPTS, read_prompts

    prompts = dict[str, str]()
    for file in given or ():
        with naming(f"--prompt-file {file}", Exception):
            prompts |= read_prompts(file, prompts)
    return prompts if given else PROMPTS


def _engine(argument: str, text: str, options: ConformOptions) -> Engine:
    if "://" in text:
        from specattn.conform import Endpoint

        with naming(argument):
            return Endpoint(text, options.served, options.timeout)
    if argument != "PLAIN":
        raise ValueError(f"{argument}: expected a URL, got {text!r}")
    if options.temperature > 0:
        raise ValueError(
            "--temperature: a checkpoint is held against a server greedily: seeds differ"
        )
    preload("specattn.conform.local")
    from specattn.cli.loading import device_named, load_tokenizer, model_folder
    from specattn.conform.local import Local
    from specattn.decoding.model.checkpoint import load_causal_model

    folder = model_folder(None if text == "tiny" else text, argument)
    with status(f"loading {folder}"), naming(argument, Exception):
        model = load_causal_model(folder, "auto", device_named("auto"))
    return Local(model, load_tokenizer(folder), str(folder))


def _answers(
    engine: Engine, prompts: dict[str, str], request: Request, at_once: int
) -> list[Answer]:
    """Return an engine's answers in order, so many requests at a time."""
    bars, pool = progress_bars(transient=True), ThreadPoolExecutor(at_once)
    with bars if console.is_terminal else nullcontext():
        task = bars.add_task(engine.name, total=len(prompts))
        jobs = [pool.submit(engine.answer, prompt, request) for prompt in prompts.values()]
        try:
            found = []
            for job in jobs:
                found.append(job.result())
                bars.advance(task)
            return found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _row(name: str, one: Finding) -> dict[str, str]:
    shown = [repr(x) if x is not None else "" for x in one.tokens]
    return {
        "prompt": escaped(name),
        "verdict": one.verdict,
        "parts at": "" if one.place is None else str(one.place),
        "tokens": " / ".join(filter(None, shown)),
        "why": one.reason,
    }

"""The worker's side of a peer: requests on standard input, answers on standard output.

A worker runs as a program in a virtual environment of its own, so this file and the workers import
nothing of specattn, of torch, or of this package. Every request and every answer is one line of
JSON:

==========  ====================================================================================
started     ``--settings`` has ``model`` (a folder), ``dtype``, ``capacity`` (prompt and new tokens
            together), ``threads``, ``cache`` (a folder that may be kept) and the peer's options
ready       ``{"version": ..., "load_seconds": ...}``
request     ``{"prompt": [ids], "new_tokens": n, "cold": bool}``: greedy, an end of text ends
            nothing; ``cold`` forgets every earlier prompt first, otherwise one that was read is
            not read again
            or, of an engine for several requests, ``{"prompts": [[ids], ...], "new_tokens": n}``
answer      ``{"tokens": [ids], "arrivals": [[seconds since the request, new tokens], ...]}``, one
            arrival for each pass that gave tokens; or ``{"texts": [[ids], ...]}``
fault       ``{"error": "..."}`` in place of either
==========  ====================================================================================
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class Engine(Protocol):
    """What a worker has to offer."""

    version: str

    def forget(self) -> None:
        """Drop what was kept of earlier prompts."""

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[list[int]]:
        """Yield new tokens as passes give them: `new_tokens` in all."""


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Load an engine with the settings of the command line and answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, required=True)
    settings = parser.parse_args().settings
    # What a library prints must not come between answers: it goes where errors go.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(make: Callable[[], dict[str, Any]]) -> bool:
        try:
            made = make()
        except Exception as failure:
            traceback.print_exc()
            made = {"error": f"{type(failure).__name__}: {failure}"}
        print(json.dumps(made), file=answers, flush=True)
        return "error" not in made

    engines: list[Engine] = []

    def ready() -> dict[str, Any]:
        start = time.perf_counter()
        engines.append(load(settings))
        return {"version": engines[0].version, "load_seconds": time.perf_counter() - start}

    if not answer(ready):
        return
    for line in sys.stdin:
        request = json.loads(line)
        served = texts if "prompts" in request else timed
        answer(lambda request=request, served=served: served(engines[0], **request))
    os._exit(0)  # nothing is to be saved, and libraries that tidy up take longer than one waits


def texts(engine: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Return the new tokens of requests that run together."""
    return {"texts": engine.texts(prompts, new_tokens)}


def timed(engine: Engine, prompt: list[int], new_tokens: int, cold: bool) -> dict[str, Any]:
    """Return new tokens, and when they came."""
    if cold:
        engine.forget()
    tokens: list[int] = []
    arrivals = []
    start = time.perf_counter()
    for more in engine.generate(prompt, new_tokens):
        tokens += more
        arrivals.append((time.perf_counter() - start, len(tokens)))
    return {"tokens": tokens, "arrivals": arrivals}

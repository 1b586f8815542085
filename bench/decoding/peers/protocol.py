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
            or, of an engine for several requests, ``{"prompts": [[ids], ...], "new_tokens": n}``;
            ``"sampling": {"temperature": T, "seed": n}`` in either, of engines that can
answer      ``{"tokens": [ids], "arrivals": [[seconds since the request, new tokens], ...]}``, one
            arrival for each pass that gave tokens; or ``{"texts": [[ids], ...], "seconds": s}``
fault       ``{"error": "..."}`` in place of either
==========  ====================================================================================

An engine has a ``version``; ``generate(prompt, new_tokens)`` yields new tokens as passes give them;
``forget()`` drops what was kept of earlier prompts; one for several requests has ``texts(prompts,
new_tokens)``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


def serve(load: Callable[[dict[str, Any]], Any]) -> None:
    """Load an engine with the settings of the command line and answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, required=True)
    settings = parser.parse_args().settings
    # What a library prints must not come between answers: it goes where errors go.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(make: Callable[..., Any], *given: Any) -> Any:
        """Answer with what is made of an engine; return the engine, None where it failed."""
        try:
            engine, made = make(*given)
        except Exception as failure:
            traceback.print_exc()
            engine, made = None, {"error": f"{type(failure).__name__}: {failure}"}
        print(json.dumps(made), file=answers, flush=True)
        return engine

    engine = answer(_loaded, load, settings)
    for line in sys.stdin if engine is not None else ():
        answer(_served, engine, json.loads(line))
    if engine is not None:
        os._exit(0)  # nothing is to be saved; libraries that tidy up take longer than one waits


def _loaded(load: Callable, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    start = time.perf_counter()
    engine = load(settings)
    return engine, {"version": engine.version, "load_seconds": time.perf_counter() - start}


def _served(engine: Any, request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    sampling = request.pop("sampling", {})
    start = time.perf_counter()
    if "prompts" in request:
        texts = engine.texts(**request, **sampling)
        return engine, {"texts": texts, "seconds": time.perf_counter() - start}
    if request.pop("cold"):
        engine.forget()
    tokens: list[int] = []
    arrivals = []
    start = time.perf_counter()
    for more in engine.generate(**request, **sampling):
        tokens += more
        arrivals.append((time.perf_counter() - start, len(tokens)))
    return engine, {"tokens": tokens, "arrivals": arrivals}

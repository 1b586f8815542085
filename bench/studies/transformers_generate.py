"""Measure what transformers' generate gains by our attention, and by our cache.

    python bench/studies/transformers_generate.py --context 4k,31k --threads 2 --json out.jsonl

The embedded target (or ``--model``) decodes greedily behind a prompt that every cache is filled
with beforehand, so a time per token is one of decoding; ``--prefill`` times the prompt too. All
ways are measured in turn, repeat by repeat; ratios are medians over repeats, over SDPA with the
default cache. Rows: `seconds_per_token`, `prefill_seconds` and `over_sdpa`, the ratios of both.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import Cache as AnyCache
from transformers import DynamicCache, PreTrainedModel, StaticCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.arguments import Parser
from common.clock import paired_ratio, timing
from common.records import Record
from common.tables import or_dash, size
from decoding.runs import generate

from specattn.integrations.transformers import Cache
from studies import study

CHUNK = 2048  # tokens of a prompt at a time, to fill the caches


class Way(NamedTuple):
    """How a model attends, and what keeps its keys and values."""

    attention: str
    make: Callable[[PreTrainedModel, int], AnyCache]  # of the model and the tokens it will hold


def _dynamic(model: PreTrainedModel, _: int) -> AnyCache:
    return DynamicCache(config=model.config)


def _static(model: PreTrainedModel, tokens: int) -> AnyCache:
    return StaticCache(config=model.config, max_cache_len=tokens)


SDPA = "sdpa"
WAYS = {
    SDPA: Way("sdpa", _dynamic),
    "sdpa, static cache": Way("sdpa", _static),
    "specattn": Way("specattn", _dynamic),
    "specattn, static cache": Way("specattn", _static),
    "specattn, its cache": Way("specattn", lambda model, _: Cache(model.config)),
}


class TransformersGenerate(study.Study):
    """A cell is a context, with a row per way."""

    defaults = {"model": study.EMBEDDED_TARGET, "dtype": "float32", "context": [4096, 31744]} | {
        "new_tokens": 48, "repeats": 5, "threads": 2
    }  # fmt: skip
    cells = ("context",)
    header = (
        ("context", ">"), ("way", "<"), ("ms per token", ">"), ("over sdpa", ">"),
        ("prefill s", ">"), ("over sdpa", ">"), ("same text", "<"),
    )  # fmt: skip

    @classmethod
    def add_arguments(cls, parser: Parser) -> None:
        """Add the option to time prompts."""
        parser.add_argument("--prefill", action="store_true", help="time the prompt as well, once")

    def measure(self, place: Record) -> Iterator[Record]:
        """Yield a row per way."""
        model, texts = self.loaded
        return iter(measure(model, texts.prompts(0, place["context"], 1)[0], self.options))

    def row(self, record: Record) -> tuple[str, ...]:
        """Return a way with its ratios."""
        return (
            size(record["context"]),
            record["way"],
            f"{record['seconds_per_token']['median'] * 1e3:.1f}",
            or_dash(record["over_sdpa"]["decoding"]),
            or_dash(record["prefill_seconds"]),
            or_dash(record["over_sdpa"]["prefill"]),
            "yes" if record["same_text_as_sdpa"] else "no",
        )


@torch.no_grad()
def measure(
    model: PreTrainedModel, prompt: torch.Tensor, options: argparse.Namespace
) -> list[Record]:
    """Return a row per way, behind one prompt [n]."""
    length = len(prompt) + options.new_tokens
    filled = fill(model, prompt)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    timed = WAYS if options.prefill else {}
    prefill = {name: prefill_seconds(model, prompt, way) for name, way in timed.items()}
    found, order = {}, list(WAYS)
    for _ in range(options.repeats):
        for name in order:
            cache = copied(filled, WAYS[name].make(model, length))
            given = [prompt], cache, options.new_tokens, WAYS[name].attention
            found[name], moments = generate(model, *given, do_sample=False)
            apart = (after - before for before, after in itertools.pairwise(moments))
            seconds[name].append(statistics.median(apart))
        order.append(order.pop(0))
    return [
        {
            "way": name,
            "context": len(prompt),
            "seconds_per_token": timing(seconds[name]),
            "prefill_seconds": prefill.get(name),
            "over_sdpa": {
                "decoding": paired_ratio(seconds[name], seconds[SDPA]),
                "prefill": prefill[SDPA] / prefill[name] if prefill else None,
            },
            "same_text_as_sdpa": found[name] == found[SDPA],
        }
        for name in WAYS
    ]


def fill(model: PreTrainedModel, prompt: torch.Tensor) -> Cache:
    """Return a cache that holds all but the prompt's last token."""
    model.set_attn_implementation("specattn")
    cache = Cache(model.config)
    for piece in prompt[None, :-1].split(CHUNK, dim=1):
        model(piece, past_key_values=cache, logits_to_keep=1)
    return cache


def copied(source: AnyCache, cache: AnyCache) -> AnyCache:
    """Fill an empty cache with what another holds."""
    for number, layer in enumerate(source.layers):
        cache.update(layer.keys, layer.values, number)
    return cache


def prefill_seconds(model: PreTrainedModel, prompt: torch.Tensor, way: Way) -> float:
    """Return the seconds of one pass over the whole prompt."""
    model.set_attn_implementation(way.attention)
    cache = way.make(model, len(prompt))
    start = time.perf_counter()
    model(prompt[None], past_key_values=cache, logits_to_keep=1)
    return time.perf_counter() - start


main = partial(study.run, TransformersGenerate)
if __name__ == "__main__":
    sys.exit(main())

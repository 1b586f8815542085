"""What transformers' own generate gains by ``attn_implementation="specattn"``, and by its cache.

    python bench/studies/transformers_generate.py --context 4k,31k --threads 2 --json out.jsonl

The embedded target (or ``--model``) decodes greedily behind a prompt that every cache is filled
with beforehand, so a time per token is one of decoding; ``--prefill`` times the prompt too. All
ways are measured in turn, repeat by repeat; ratios are medians over repeats, over SDPA with the
default cache. Rows: `seconds_per_token`, `prefill_seconds` and `over_sdpa`, the ratios of both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Cache as AnyCache
from transformers import DynamicCache, PreTrainedModel, StaticCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments, machine
from common.clock import paired_ratio, timing
from common.records import Record, RecordFile
from common.tables import aligned, size
from decoding import models
from decoding.texts import Files, held_out_files

from specattn.integrations.transformers import Cache
from specattn.planning.models import EMBEDDED_TARGET

CHUNK = 2048  # tokens of a prompt at a time, to fill the caches


@dataclass(frozen=True)
class Way:
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


class Arrivals:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Note a token; the first call brings the prompt."""
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: all has been noted."""


def main() -> None:
    """Print a row per context and way."""
    parser = arguments.Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED_TARGET)
    parser.add_argument("--dtype", choices=models.DTYPES, default="float32")
    parser.add_argument("--context", type=arguments.numbers, default=[4096, 31744])
    parser.add_argument("--new-tokens", type=arguments.number, default=48)
    parser.add_argument("--repeats", type=arguments.number, default=5)
    parser.add_argument("--threads", type=arguments.number, default=2)
    parser.add_argument("--prefill", action="store_true", help="time the prompt as well, once")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cpu = torch.device("cpu")
    with parser.refusing():
        model, tokenizer = models.checkpoint(options.model, models.DTYPES[options.dtype], cpu)
        texts = Files(tokenizer, held_out_files())
        prompts = [texts.prompts(0, context, 1)[0] for context in options.context]
    plan = {name: getattr(options, name) for name in ("new_tokens", "repeats", "dtype")}
    out = RecordFile(
        options.json,
        [{"kind": "run", "study": "transformers-generate", **machine.describe(cpu), "plan": plan}],
    )
    for prompt in prompts:
        for row in measure(model, prompt, options):
            out.add(row)
    print(table(out.rows))
    if disturbed := machine.disturbed(out.rows):
        print(disturbed)


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
    found, others = {}, machine.Others()
    order = list(WAYS)
    for _ in range(options.repeats):
        for name in order:
            cache = copied(filled, WAYS[name].make(model, length))
            found[name], median = decode(model, prompt, WAYS[name], cache, options.new_tokens)
            seconds[name].append(median)
        order.append(order.pop(0))
    busy = others.cores()
    return [
        {
            "kind": "row",
            "way": name,
            "context": len(prompt),
            "seconds_per_token": timing(seconds[name]),
            "prefill_seconds": prefill.get(name),
            "over_sdpa": {
                "decoding": paired_ratio(seconds[name], seconds[SDPA]),
                "prefill": prefill[SDPA] / prefill[name] if prefill else None,
            },
            "same_text_as_sdpa": found[name] == found[SDPA],
            "others": busy,
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


def decode(
    model: PreTrainedModel, prompt: torch.Tensor, way: Way, cache: AnyCache, new_tokens: int
) -> tuple[list[int], float]:
    """Return the text that `generate` continues with, and the median seconds between tokens."""
    model.set_attn_implementation(way.attention)
    arrivals = Arrivals()
    ids = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        past_key_values=cache,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=arrivals,
    )
    came = arrivals.moments[1:]
    apart = [after - before for before, after in zip(came, came[1:], strict=False)]
    return ids[0, len(prompt) :].tolist(), statistics.median(apart)


def prefill_seconds(model: PreTrainedModel, prompt: torch.Tensor, way: Way) -> float:
    """Return the seconds of one pass over the whole prompt."""
    model.set_attn_implementation(way.attention)
    cache = way.make(model, len(prompt))
    start = time.perf_counter()
    model(prompt[None], past_key_values=cache, logits_to_keep=1)
    return time.perf_counter() - start


def table(rows: list[Record]) -> str:
    """Return the rows as text."""
    header = [("context", ">"), ("way", "<"), ("ms per token", ">"), ("over sdpa", ">")]
    header += [("prefill s", ">"), ("over sdpa", ">"), ("same text", "<")]

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return aligned(
        header,
        [
            (
                size(row["context"]),
                row["way"],
                f"{row['seconds_per_token']['median'] * 1e3:.1f}",
                ratio(row["over_sdpa"]["decoding"]),
                ratio(row["prefill_seconds"]),
                ratio(row["over_sdpa"]["prefill"]),
                "yes" if row["same_text_as_sdpa"] else "no",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()

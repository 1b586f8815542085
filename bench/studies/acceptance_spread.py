"""Compare acceptance of methods on the same texts, so that none has the luckier ones.

    python bench/studies/acceptance_spread.py --context 4k,16k --texts 8 --method vegas:gamma=6 \
        --method streaming:gamma=6 --method streaming:gamma=6,budget=512

The first method is what the others are held against, text by text. Above temperature 0 all see
common random numbers: Gumbel noise that depends on the place in the text alone is added to the
logits, and the largest sum, which is a sample of the distribution, is taken. So every method
continues with the same text. A drafted token is accepted where draft and target draw it from the
same noise; that is rarer than under speculative sampling, but as there, the nearer the draft's
distribution the likelier. Where a draft is chosen by rank and not sampled, as in trees, nothing is
lost: the text is a sample, and the draft has it or not. No time is taken: this may run beside
anything.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.records import Record
from common.tables import aligned, size
from transformers import LogitsProcessor, LogitsProcessorList

from specattn.decoding import Method, RequestStatistics, Statistics, Target
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.decoding.passes.attention import KVSelector
from specattn.decoding.passes.runner import Verification
from studies import study

HEADER = [("method", "<")] + [
    (name, ">")
    for name in ("tau", "drafting", "more than the first", "read", "same text", "given all before")
]


class PlacedNoise(LogitsProcessor):
    """Adds Gumbel noise that depends on the place in the text alone."""

    def __init__(self, temperature: float, seed: int):
        self.temperature, self.seed = temperature, seed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores [n, V] behind `input_ids` [n, length] with noise."""
        # torch looks at 32 bits of a seed.
        generator = torch.Generator().manual_seed((self.seed << 20) + input_ids.shape[1])
        noise = -torch.empty(scores.shape[-1]).exponential_(generator=generator).log()
        return scores / self.temperature + noise


@dataclass(frozen=True)
class Counted:
    """A KV selector that notes how many cached tokens a layer and head attends to."""

    selector: KVSelector
    counts: list[float]

    def select(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the selector's positions."""
        indices, lengths = self.selector.select(layer, q)
        self.counts.append(float(lengths.float().mean()))
        return indices, lengths


class CountingTarget(Target):
    """Notes what every draft step reads, sinks, recent tokens and earlier drafts included."""

    counts: list[float]

    def draft(self, tokens: torch.Tensor, offset: Any, selector: KVSelector) -> Verification:
        """Draft as every target does."""
        return super().draft(tokens, offset, Counted(selector, self.counts))


class AcceptanceSpread(study.Study):
    """A cell is a method on a text; one that the file has is not measured again."""

    defaults = {"method": None, "context": [4096], "temperature": [0.0, 1.0]} | {
        "texts": 4, "new_tokens": 128
    }  # fmt: skip
    cells, resumes = ("context", "text", "temperature", "method"), True
    built_with = {"vegas": {"gamma": 6}}
    target = CountingTarget

    def __init__(self, options: Any):
        if not options.method:
            raise ValueError("--method: give one or more")
        super().__init__(options)

    def measure(self, place: Record) -> Iterator[Record]:
        """Decode a text with a method."""
        snapshot = self.snapshot(place["context"], place["text"])
        how = self.options.new_tokens, place["temperature"]
        yield measure(snapshot, self.methods[place["method"]], *how, seed=place["text"])

    def table(self, records: list[Record]) -> str:
        """Return a table per context and temperature."""
        return "\n\n".join(
            table(records, list(self.methods), context, heat, self.options.texts)
            for context in self.options.context
            for heat in self.options.temperature
        )


def measure(
    snapshot: PromptSnapshot, method: Method, new_tokens: int, temperature: float, seed: int
) -> Record:
    """Decode with a method and return what its drafts were worth."""
    snapshot.target.counts = counts = list[float]()
    noise = [PlacedNoise(temperature, seed)] if temperature else []
    (tokens,), found = snapshot.run(
        method, new_tokens, LogitsProcessorList(noise), do_sample=False, seed=seed
    )
    total = found.total
    return {
        "tau": total.mean_acceptance_length,
        "drafting": 1 + total.accepted / max(1, sum(total.offered_at[:1])),
        "read": fmean(counts) if counts else None,  # the drafts are not the target's
        "accepted_at": total.accepted_at,
        "offered_at": total.offered_at,
        "continuation": hashlib.sha256(str(tokens).encode()).hexdigest()[:12],
    }


def table(
    records: Sequence[Record], methods: Sequence[str], context: int, temperature: float, texts: int
) -> str:
    """Return means over texts, and of differences from the first method, with standard errors."""
    at = {"context": context, "temperature": temperature}
    own = [one for one in records if at.items() <= one.items() and one["text"] < texts]
    own.sort(key=lambda one: one["text"])
    by_text = {name: [one for one in own if one["method"] == name] for name in methods}
    first, rows = by_text[methods[0]], []
    for name, found in by_text.items():
        pairs = list(zip(found, first, strict=True))
        more = [one["drafting"] - base["drafting"] for one, base in pairs]
        same = sum(one["continuation"] == base["continuation"] for one, base in pairs)
        means = (mean([one[figure] for one in found]) for figure in ("tau", "drafting"))
        read = "-" if found[0]["read"] is None else f"{fmean(one['read'] for one in found):.0f}"
        held = mean(more, "+") if found is not first else "-"
        rows.append((name, *means, held, read, f"{same} of {len(found)}", by_position(found)))
    return f"{size(context)}, T={temperature:g}, {texts} texts\n{aligned(HEADER, rows)}"


def by_position(found: Sequence[Record]) -> str:
    """Return the shares of drafts accepted at each position among those that came so far."""
    names = ("accepted_at", "offered_at")
    if not all(set(names) <= one.keys() for one in found):  # rows of an earlier version
        return "-"
    requests = [RequestStatistics(**{name: one[name] for name in names}) for one in found]
    return " ".join(f"{rate:.1%}" for rate in Statistics(requests).total.conditional_rates)


def mean(values: Sequence[float], sign: str = "") -> str:
    """Return a mean and its standard error over texts."""
    error = f" ±{stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.2f}{error}"


main = partial(study.run, AcceptanceSpread)
if __name__ == "__main__":
    sys.exit(main())

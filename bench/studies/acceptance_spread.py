"""Whether one method accepts more than another, or had the luckier texts: all on the same texts.

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
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments
from common.records import Record, RecordFile
from common.tables import aligned, size
from decoding import models
from decoding.cases import Entry
from decoding.texts import Files, held_out_files
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from specattn.decoding import Method, RequestStatistics, Statistics, Target
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.decoding.engine.target import Verification
from specattn.decoding.passes.attention import KVSelector
from specattn.planning.models import EMBEDDED_TARGET

PLACE = ("context", "text", "temperature", "method")
HEADER = [("method", "<")] + [
    (name, ">")
    for name in ("tau", "drafting", "more than the first", "read", "same text", "given all before")
]


def main(argv: list[str] | None = None) -> int:
    """Print one table per context and temperature."""
    parser = arguments.Parser(
        prog="acceptance_spread.py", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--method", action="append", required=True, metavar="NAME[:OPTION=VALUE,...]")
    add("--context", type=arguments.numbers, default=[4096], metavar="N[,N]")
    add("--temperature", type=arguments.temperatures, default=[0.0, 1.0], metavar="T[,T]")
    add("--texts", type=arguments.number, default=4, metavar="N")
    add("--new-tokens", type=arguments.number, default=128, metavar="N")
    add("--json", type=Path, metavar="FILE", help="JSON Lines; what it has is not measured again")
    options = parser.parse_args(argv)
    try:
        methods = {
            text: Entry.parse(text).build({"vegas": {"switch": False}}) for text in options.method
        }
    except ValueError as error:
        parser.error(str(error))
    model, tokenizer = models.checkpoint(EMBEDDED_TARGET, torch.float32, torch.device("cpu"))
    texts, file = Files(tokenizer, held_out_files()), _file(options.json)
    for context in options.context:
        for number in range(options.texts):
            snapshot: PromptSnapshot | None = None
            for heat, (name, method) in itertools.product(options.temperature, methods.items()):
                place = dict(zip(PLACE, (context, number, heat, name), strict=True))
                if not any(place.items() <= one.items() for one in file.records):
                    room = options.new_tokens + max(one.max_nodes for one in methods.values())
                    snapshot = snapshot or counting(
                        model,
                        texts.prompts(number, context, 1),
                        room,
                        keep_features=any(one.reads_features for one in methods.values()),
                    )
                    found = measure(snapshot, method, options.new_tokens, heat, seed=number)
                    file.add(place | found)
        for heat in options.temperature:
            print(table(file.records, list(methods), context, heat, options.texts), end="\n\n")
    return 0


def _file(path: Path | None) -> RecordFile:
    """Return the file with what was measured before."""
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
    return RecordFile(path, map(json.loads, lines))


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

    def draft(
        self, tokens: torch.Tensor, offset: int | torch.Tensor, selector: KVSelector
    ) -> Verification:
        """Draft as every target does."""
        return super().draft(tokens, offset, Counted(selector, self.counts))


def counting(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], room: int, **options: bool
) -> PromptSnapshot:
    """Return prompts behind which `measure` decodes."""
    target = CountingTarget(model, len(prompts), len(prompts[0]) + room)
    return PromptSnapshot(target, prompts, **options)


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
        "drafting": 1 + total.accepted / total.offered_at[0],
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
    by_text = {
        name: sorted((one for one in own if one["method"] == name), key=lambda one: one["text"])
        for name in methods
    }
    first, rows = by_text[methods[0]], []
    for name, found in by_text.items():
        more = [one["drafting"] - base["drafting"] for one, base in zip(found, first, strict=True)]
        same = sum(
            a["continuation"] == b["continuation"] for a, b in zip(found, first, strict=True)
        )
        rows.append(
            (
                name,
                mean([one["tau"] for one in found]),
                mean([one["drafting"] for one in found]),
                mean(more, "+") if found is not first else "-",
                "-" if found[0]["read"] is None else f"{fmean(one['read'] for one in found):.0f}",
                f"{same} of {len(found)}",
                by_position(found),
            )
        )
    return f"{size(context)}, T={temperature:g}, {texts} texts\n{aligned(HEADER, rows)}"


def by_position(found: Sequence[Record]) -> str:
    """Return the shares of drafts accepted at each position among those that came so far."""
    names = ("accepted_at", "offered_at")
    requests = [RequestStatistics(**{name: one[name] for name in names}) for one in found]
    rates = Statistics(requests).total.conditional_rates
    return " ".join(f"{100 * rate:.1f}%" for rate in rates)


def mean(values: Sequence[float], sign: str = "") -> str:
    """Return a mean and its standard error over texts."""
    error = f" ±{stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.2f}{error}"


if __name__ == "__main__":
    sys.exit(main())

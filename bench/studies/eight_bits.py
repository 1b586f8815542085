"""What a cache of 8 bits does to logits: teacher-forced over held-out texts, against its own type.

    python bench/studies/eight_bits.py --context 4k --texts 2

Free-running texts part at the first near-tie, and say little from there on: so the same tokens go
through the model with every cache, and their logits are compared. No time is taken: this may run
beside anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.records import Record

from specattn.decoding import Target
from specattn.decoding.engine.loop import CHUNK_SIZE
from specattn.decoding.engine.target import KV_DTYPES
from specattn.planning.models import EMBEDDED_TARGET
from studies import study


class EightBits(study.Study):
    """A cell is a text, of which there is a row for each type of the cache."""

    defaults = {"model": EMBEDDED_TARGET, "dtype": "bfloat16", "context": [4096], "texts": 2}
    header = [(name, ">") for name in ("cache", "cosine", "KL, nats", "same next token")]

    def measure(self, place: Record) -> Iterator[Record]:
        """Compare the logits of all tokens of a text."""
        model, texts = self.loaded
        (prompt,) = texts.prompts(place["text"], place["context"], 1)
        expected = logits(model, prompt, None)
        for kv_dtype in KV_DTYPES:
            found = logits(model, prompt, kv_dtype)
            p, q = expected.log_softmax(-1), found.log_softmax(-1)
            yield {
                "kv_dtype": kv_dtype,
                "cosine": torch.cosine_similarity(found, expected, dim=-1).mean().item(),
                "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
                "same": (found.argmax(-1) == expected.argmax(-1)).double().mean().item(),
            }

    def row(self, record: Record) -> list[str]:
        """Return a record as a line of the table."""
        figures = f"{record['cosine']:.6f}", f"{record['kl']:.2e}", f"{record['same']:.2%}"
        return [record["kv_dtype"], *figures]


@torch.no_grad()
def logits(model: Any, prompt: torch.Tensor, kv_dtype: str | None) -> torch.Tensor:
    """Return the logits [L, V] of all tokens of a prompt, in float64."""
    target, found = Target(model, 1, len(prompt), kv_dtype=kv_dtype), []
    with target.in_use():
        target.prefill(
            [prompt],
            CHUNK_SIZE,
            on_features=lambda _, rows: found.append(target.logits_of(rows[0]).double()),
        )
    return torch.cat(found)


main = partial(study.run, EightBits)
if __name__ == "__main__":
    sys.exit(main())

"""Ranks that run the same rounds: what could differ between them is decided by the first.

All ranks compute alike from the same tokens, so most of it is the same without a word. What a clock
or a signal says is not, so that comes from rank 0; and before each verification the ranks compare
what they are about to verify, so a rank that went astray is found before it hangs the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import MaxTimeCriteria, PreTrainedModel, StoppingCriteriaList

import specattn
from specattn.decoding.model.model import Model
from specattn.decoding.text.sequences import StopRequest
from specattn.decoding.text.statistics import Clock
from specattn.distributed.group import ContextParallel, Ranks
from specattn.tree import Tree


class Lockstep:
    """Keeps the ranks of a group together; `context` are those that hold the cache together."""

    def __init__(self, ranks: Ranks, context: ContextParallel | None = None):
        self.ranks = ranks
        self.context = ranks if isinstance(ranks, ContextParallel) else context
        self._stop: _FirstRanksStop | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, context: ContextParallel | None) -> Lockstep | None:
        """Return what keeps the ranks of a divided model or cache together, None for one rank.

        ValueError: both are divided, but not over all ranks.
        """
        tensor = Model.ranks_of(model)
        if context is None or tensor is None:
            ranks = context or tensor
            return None if ranks is None else cls(ranks)
        every = Ranks()
        if context.size * tensor.size != every.size:
            raise ValueError(
                f"{every.size} ranks are not {context.size} shares of the cache times "
                f"{tensor.size} parts of the model: give context_parallel the group of the ranks "
                "that hold the same part"
            )
        return cls(every, context)

    def begin(
        self,
        model: PreTrainedModel,
        method: Any,
        prompts: Sequence[torch.Tensor],
        limits: Sequence[int],
        seed: int | None,
        generator: torch.Generator | None,
        kv_dtype: str | None,
    ) -> int:
        """Check that all ranks were given the same run; return its seed, by default rank 0's.

        `limits` are where each row must end. Raises `RanksDisagree`, and ValueError for a
        generator, of which every rank would have another.
        """
        if generator is not None:
            raise ValueError("on several ranks give seed: a generator is one rank's own")
        tokens = [prompt.tolist() for prompt in prompts]
        options = {
            name: value
            for name, value in vars(method).items()
            if isinstance(value, (int, float, str, tuple))
        }
        self.ranks.agree_on(
            {
                "specattn": specattn.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "block_size": self.context and self.context.block_size,
                "threads": torch.get_num_threads(),
                "dtype": model.dtype,
                "kv_dtype": kv_dtype,
                "a model of type": model.config.model_type,
                "method": f"{method.name} with {options}",
                "prompts of checksum": zlib.crc32(repr(tokens).encode()),
                "limits": list(limits),
                "seed": seed,
            }
        )
        drawn = int(self.ranks.of_first(int(torch.randint(2**53, (), device="cpu"))))
        return drawn if seed is None else seed

    def clock(self, device: torch.device) -> Clock:
        """Return a clock whose spans are those of rank 0."""
        return _FirstRanksClock(self.ranks, device)

    def criteria(self, rows: Sequence[StoppingCriteriaList]) -> list[StoppingCriteriaList]:
        """Return stopping criteria in which a request or the time that is over is rank 0's."""
        own = [
            one for row in rows for one in row if isinstance(one, (StopRequest, MaxTimeCriteria))
        ]
        self._stop = _FirstRanksStop(own)
        return [
            StoppingCriteriaList([*(one for one in row if one not in own), self._stop])
            for row in rows
        ]

    def check(self, tree: Tree, tokens: torch.Tensor) -> None:
        """Compare what is verified next (`RanksDisagree`), and learn whether texts shall end."""
        shape = [parent for parents in tree.parent_lists for parent in parents]
        fingerprint = hash((*shape, *tokens.flatten().tolist())) & (2**63 - 1)
        stop = self._stop
        asked = self.ranks.agree(fingerprint, stop is not None and stop.wanted)
        if stop is not None:
            stop.asked = asked


class _FirstRanksClock(Clock):
    def __init__(self, ranks: Ranks, device: torch.device):
        super().__init__(device)
        self.ranks = ranks

    def passed(self, moment: Any) -> bool:
        """Wait for it: whether it has passed would not be the same on all ranks."""
        if self.on_cuda:
            moment.synchronize()
        return True

    def seconds(self, begin: Any, end: Any) -> float:
        return self.ranks.of_first(super().seconds(begin, end))


class _FirstRanksStop(StopRequest):
    """What rank 0 said before the last verification."""

    def __init__(self, own: Sequence[StopRequest | MaxTimeCriteria]):
        super().__init__()
        self.own = own

    @property
    def wanted(self) -> bool:
        """Whether this rank would end the texts."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
        return any(bool(one(ids, None).any()) for one in self.own)

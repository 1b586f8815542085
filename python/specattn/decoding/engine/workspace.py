"""`Workspace`: what a run computes in, which the next run of the model takes up again.

To record or capture a pass takes as long as several; what was recorded reads the memory that it was
recorded over. So both outlive the run, together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from specattn.backends.select import chosen
from specattn.decoding.model.model import Model
from specattn.decoding.model.text_model import text_model
from specattn.decoding.passes.runner import Runner
from specattn.decoding.passes.seen import Seen
from specattn.kv_cache import KVCache

T = TypeVar("T")

MOST_WASTED = 4
"""A run borrows a cache of at most so many times the tokens that it needs."""


class Conditions(NamedTuple):
    """What two runs must have in common to share a workspace, beside the length."""

    batch: int
    stored: torch.dtype | None
    compile: str
    structure: int  # its number
    turned_by: int | None  # the longest text, where the rope turns with it
    backend: str
    inference: bool
    autocast: bool

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        batch: int,
        stored: torch.dtype | None,
        compile: str,
        structure: int,
        turned_by: int | None,
    ) -> Conditions:
        """Return those of a run that begins now; dtype and device are `Seen` in the model."""
        _, backend = chosen("hybrid_tree_attention", model.device, model.dtype)
        inference = torch.is_inference_mode_enabled()
        autocast = torch.is_autocast_enabled(model.device.type)
        how = backend.name, inference, autocast
        return cls(batch, stored, compile, structure, turned_by, *how)


class _Beside(NamedTuple):
    owner: Any
    seen: Seen | None
    memory: Any

    @property
    def nbytes(self) -> int:
        return getattr(self.memory, "nbytes", 0)

    def is_of(self, owner: Any) -> bool:
        return self.owner is owner and (self.seen is None or self.seen.is_of(owner))


class Workspace:
    """A cache with the runner of passes over it, and what drafters keep beside these.

    It serves one run at a time: a `Target` makes one or borrows the model's, and gives it back.
    Nothing in it may hold the model itself.
    """

    def __init__(
        self,
        conditions: Conditions | None,
        seen: Seen | None,
        cache: KVCache,
        windows: list[int | None],
    ):
        self.conditions, self.seen, self.cache, self.windows = conditions, seen, cache, windows
        self.runner: Runner | None = None
        self.met = set[Any]()  # shapes of passes that were recorded or captured
        self._beside: dict[Hashable, _Beside] = {}
        self._recalled: set[Hashable] = set()

    def fits(
        self,
        model: PreTrainedModel,
        conditions: Conditions,
        capacity: int,
        windows: list[int | None],
    ) -> bool:
        """Whether a run that needs so much may compute here, as in a workspace of its own."""
        return (
            capacity <= self.cache.capacity <= MOST_WASTED * capacity
            and (conditions, windows) == (self.conditions, self.windows)
            and self.seen is not None
            and self.seen.is_of(model)
        )

    def recall(self, kind: Hashable, owner: Any, make: Callable[[], T]) -> T:
        """Return what an `owner`, such as a drafter, computes in; one of a kind for each run.

        It is made anew where the last run had none, or for another owner, or the owner has changed.
        """
        if kind in self._recalled:
            return make()  # the first has it
        self._recalled.add(kind)
        known = self._beside.pop(kind, None)
        if known is None or not known.is_of(owner):
            del known
            seen = Seen(owner) if isinstance(owner, nn.Module) else None
            known = _Beside(owner, seen, make())
        self._beside[kind] = known
        found: T = known.memory
        return found

    def end_run(self) -> None:
        """Drop what the run that ends has not recalled."""
        self._beside = {kind: self._beside[kind] for kind in self._recalled & self._beside.keys()}
        self._recalled = set()

    @property
    def nbytes(self) -> int:
        """Bytes of caches, the drafters' included; recordings and graphs have more of their own."""
        return self.cache.nbytes + sum(one.nbytes for one in self._beside.values())

    @property
    def drafters_nbytes(self) -> int:
        """Bytes of the caches of drafters that the run has recalled."""
        recalled = self._recalled & self._beside.keys()
        return sum(self._beside[kind].nbytes for kind in recalled)


def release(model: PreTrainedModel) -> int:
    """Free what runs of a model keep for the next one: caches, recorded passes and CUDA graphs.

    `generate` keeps what its last run on the model computed in, so that a run of the same batch
    size that is not longer, or up to a quarter of its length, need not allocate, record and capture
    again. It is freed with the model; before, by this, or by a run that it does not fit. A run that
    is under way is not disturbed.

    Parameters
    ----------
    model : PreTrainedModel

    Returns
    -------
    int
        Bytes of the caches that were freed, 0 where nothing was kept.
    """
    workspace = Model.of(text_model(model)).take()
    return 0 if workspace is None else workspace.nbytes

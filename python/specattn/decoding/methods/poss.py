"""PosS: draft with position specialists on the target's features, as trees that EAGLE-2 grows.

One specialist after the other predicts the feature of the next token; the target's head turns
features into tokens. With one specialist for all positions this is EAGLE-2, or HASS. (*PosS:
Position Specialist Generates Better Draft for Speculative Decoding*, and EAGLE-2, arXiv
2406.16858.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from specattn.decoding.drafting import Draft, DraftContext, Drafter, Verified
from specattn.decoding.method import Method
from specattn.decoding.methods.dynamic_tree import DynamicTree
from specattn.decoding.methods.poss_block import SpecialistBlock
from specattn.decoding.methods.trained import fitting_drafter
from specattn.decoding.statistics import Clock, Stopwatch, synchronize
from specattn.drafters import PosSDrafter
from specattn.reference.tree_mask import pack_tree_mask
from specattn.tree import Tree

AUTO_SIZES = (20, 30, 40, 50, 60, 80)
"""Sizes that ``total_tokens="auto"`` chooses from."""

_REPEATS = 3


@dataclass(frozen=True)
class PosS(Method, name="poss"):
    """Drafting with position specialists.

    Trees are chosen by rank, at every temperature, so the target's own sample decides at every node
    and its distribution is preserved, the bonus token's too.

    Parameters
    ----------
    drafter : PosSDrafter or path, optional
        A drafter, or the folder that holds one. By default the folder ``poss`` within the target's.
        A path is loaded for every run; a drafter is used as it is.
    width : int
        Nodes that are expanded per level, and children of each.
    depth : int
        Levels below the root.
    total_tokens : int or "auto"
        Nodes that are verified, the root included. "auto" measures in the first round what trees of
        `AUTO_SIZES` cost, and takes the size that promises most tokens per second.
    window : int, optional
        Positions that the drafter looks back; by default all. Drafters of short rows may gain by a
        window in long texts.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: there is no drafter,
        or it does not fit the target.
    """

    reads_features = True

    drafter: PosSDrafter | Path | str | None = None
    width: int = 10
    depth: int = 6
    total_tokens: int | Literal["auto"] = 60
    window: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("depth", 1), ("total_tokens", 2), ("window", 1)):
            value = getattr(self, name)
            if value is None or (name, value) == ("total_tokens", "auto"):
                continue
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be at least {least}, got {value!r}")

    @property
    def max_nodes(self) -> int:
        """The largest tree that may be verified."""
        most = max(AUTO_SIZES) if self.total_tokens == "auto" else self.total_tokens
        return min(most, 1 + self.width + (self.depth - 1) * self.width**2)

    def clipped(self, depth: int) -> PosS:
        """Return this method with at most `depth` levels, and 1 at least."""
        return replace(self, depth=max(1, min(self.depth, depth)))

    def prepared(self, model: PreTrainedModel) -> PosS:
        """Return this method with its drafter loaded and found to fit `model`."""
        return replace(self, drafter=fitting_drafter(PosSDrafter, self.drafter, model))

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter for one run."""
        module = self.prepared(context.target.model).drafter
        assert isinstance(module, PosSDrafter)
        nodes = 1 + self.width * (self.depth - 1)
        block = SpecialistBlock(module.eval(), context, nodes, self.window)
        return _PosSDrafter(block, self)


class _PosSDrafter(Drafter):
    def __init__(self, block: SpecialistBlock, method: PosS):
        self.block, self.method = block, method
        self.size = None if method.total_tokens == "auto" else method.total_tokens
        self.cache_bytes = block.text.nbytes + block.tree.nbytes
        device = block.target.device
        self.watch = Stopwatch(device)
        self.root_alone = Tree.chain(0, device=device)
        # Which bit of a packed mask each node is, level by level.
        levels = [1, *[method.width] * (method.depth - 1)]
        itself = pack_tree_mask(torch.eye(sum(levels), dtype=torch.bool, device=device))
        self.own_bits = itself.split(levels)

    def on_prefill(self, start: int, features: torch.Tensor) -> None:
        self.block.on_prefill(start, features)

    def propose(self, root: torch.Tensor) -> Draft:
        levels = min(self.method.depth, self.block.sequences.draft_depth)
        if not levels:
            return Draft(self.root_alone, root[:, None])
        clock = self.block.target.clock()
        begin = _begin(clock) if self.size is None else None
        self.watch.lap("elsewhere")
        x = self.block.begin()
        mask = self.own_bits[0].expand(len(root), -1, -1)
        tree = DynamicTree(root, self.method.width)
        for depth in range(levels):
            features = self.block.features(x, depth, mask)
            logits = self.block.head(features)
            self.watch.lap("layer_seconds")
            tree.score(logits)
            if depth + 1 < levels:
                tokens, parents = tree.expand()
                own = self.own_bits[depth + 1][: tokens.shape[1]]
                mask = mask.gather(1, _wide(parents, mask)) | own
                self.watch.lap("tree_seconds")
                x = self.block.fuse(tokens, features.gather(1, _wide(parents, features)))
        if self.size is None:
            self.size = self._best_size(tree, _seconds_since(clock, begin), clock)
        draft = tree.best(self.size)
        self.watch.lap("tree_seconds")
        return draft

    def observe(self, verified: Verified) -> None:
        self.watch.lap("elsewhere")
        self.block.accept(verified)
        self.watch.lap("catch_up_seconds")

    def compact(self, rows: list[int]) -> None:
        self.block.compact(rows)

    def details(self) -> dict[str, Any]:
        """Return the parts of drafting, in seconds of the whole run, and what the caches take."""
        seconds = self.watch.totals()
        seconds.pop("elsewhere", None)
        return {**seconds, "total_tokens": self.size, "drafter_cache_bytes": self.cache_bytes}

    def _best_size(self, tree: DynamicTree, draft_seconds: float, clock: Clock) -> int:
        """Return the size whose tree promises most tokens for the time of a round."""
        target = self.block.target

        def speed(size: int) -> float:
            draft = tree.best(size)
            seconds = _seconds(lambda: target.verify(draft.tree, draft.tokens), clock)
            return tree.expected_length(size) / (draft_seconds + seconds)

        sizes = [size for size in AUTO_SIZES if size <= 1 + tree.candidates]
        return max(sizes or AUTO_SIZES[:1], key=speed)


def _seconds(call: Callable[[], Any], clock: Clock) -> float:
    """Return the shortest time of a few calls."""
    times = []
    for _ in range(_REPEATS):
        begin = _begin(clock)
        call()
        times.append(_seconds_since(clock, begin))
    return min(times)


def _begin(clock: Clock) -> Any:
    """Return the moment at which the device has nothing left to do."""
    synchronize(clock.device)
    return clock.now()


def _seconds_since(clock: Clock, begin: Any) -> float:
    """Return the time that the device took for all it has been given since `begin`."""
    end = clock.now()
    synchronize(clock.device)
    return clock.seconds(begin, end)


def _wide(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return index[..., None].expand(-1, -1, like.shape[-1])

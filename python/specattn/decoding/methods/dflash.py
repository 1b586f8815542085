"""DFlash and JetFlow: draft a block of tokens in one pass, and trees of what is likely in it.

A block's rows score what may follow at their own positions, alike behind whatever is drafted before
them. So a tree is a set of the most probable paths (arXiv 2602.06036 drafts chains; arXiv
2604.12989 and 2606.18394 trees, the latter by rows that see no later ones).
`specattn.drafters.dflash` has the equations, `best_paths` the trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast

import torch
from transformers import PreTrainedModel

from specattn.blocks import Ops, Place, Store, norm_of, projection
from specattn.decoding.drafting.best_paths import Paths, best_paths, level_bounds
from specattn.decoding.drafting.gains import beams
from specattn.decoding.drafting.grown import MOST_TOKENS, Grown
from specattn.decoding.drafting.pairs import Level, PairBlock, caches_of
from specattn.decoding.drafting.pruning import Candidates
from specattn.decoding.engine.contract import DraftContext
from specattn.decoding.model.parts import Layer, drafter_layer
from specattn.decoding.passes.decoder import rotated, run_layer, stored
from specattn.drafters import DFlashDrafter
from specattn.reference.tree_mask import pack_tree_mask


@dataclass(frozen=True)
class DFlash(Grown[DFlashDrafter], name="dflash"):
    """Drafting with DFlash's drafter, or with a causal one, as JetFlow has them.

    Parameters
    ----------
    drafter : DFlashDrafter or path, optional
        A drafter, or the folder that holds one, as its authors publish them. By default the folder
        ``dflash`` within the target's. A path is loaded once.
    width : int
        Tokens of every depth that trees are made of. 1 drafts chains.
    depth : int
        Levels below the root; no draft is deeper than the drafter's block.
    total_tokens, window
        As for `Grown`. A window is counted from the block's last row, of a causal head from each
        row, and is no less than the block.
    causal : bool, optional
        Whether rows of a block see no later ones, of a drafter whose folder says nothing of it.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: there is no drafter,
        it does not fit the target, or its folder says otherwise than `causal`.
    """

    kind = DFlashDrafter

    depth: int = 15
    causal: bool | None = None

    @property
    def max_nodes(self) -> int:
        """The largest tree that may be verified."""
        most = self.total_tokens or MOST_TOKENS
        return min(most, 1 + sum(level_bounds(self.depth, self.width, most)))

    def prepared(self, model: PreTrainedModel) -> Self:
        """Return this method with its drafter loaded and found to fit `model` and `causal`."""
        method = super().prepared(model)
        said = cast(DFlashDrafter, method.drafter).config.causal
        if None not in (said, self.causal) and said != self.causal:
            raise ValueError(f"causal: {self.causal} was given, the drafter's folder says {said}")
        return replace(method, causal=bool(self.causal if said is None else said))

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return the layers that the drafter reads."""
        return tuple(self.loaded(model).config.feature_layers or ())

    def block(self, context: DraftContext, nodes: int) -> PairBlock:
        """Return the drafter beside the target of a run."""
        method = self.prepared(context.target.model)
        drafter, most = self.loaded(context.target.model), self.max_nodes - 1
        efforts = beams(self.width, self.depth) if self.total_tokens is None else []
        depths = [*(effort.depth for effort in efforts), self.depth]
        return DFlashBlock(drafter, context, most, depths, bool(method.causal), self.window)


@dataclass(frozen=True)
class JetFlow(DFlash, name="jetflow"):
    """`DFlash` by another name, for heads that are causal: a folder that says otherwise is refused.

    Parameters
    ----------
    drafter, width, depth, total_tokens, window, causal
        As for `DFlash`; the width is its authors'.
    """

    width: int = 7
    causal: bool | None = True


class DFlashBlock(PairBlock):
    """The drafter's layers, with the keys and values that each has of the text.

    Its pair at position t is the feature of token t alone, and the tree's rows are a block's.

    Parameters
    ----------
    drafter : DFlashDrafter
    context : DraftContext
    budget : int
        Nodes of a tree below its root.
    depths : sequence of int
        Levels of the trees that programs are made for; those between are cut from the next deeper.
    causal : bool
        Whether rows of a block see no later ones.
    window : int, optional
    """

    def __init__(
        self,
        drafter: DFlashDrafter,
        context: DraftContext,
        budget: int,
        depths: Sequence[int],
        causal: bool = False,
        window: int | None = None,
    ):
        self.drafter, config = drafter, drafter.config
        self.budget, self.causal = budget, causal
        self.size, self.head_dim = config.block_size, config.head_dim
        self.depths = sorted({min(depth, self.size - 1) for depth in depths})
        self.layers = layers_of(drafter)
        super().__init__(context, *caches_of(drafter, config.layers), self.size, self.size)
        device = context.target.device
        self.masks = torch.full((1, self.size - 1), config.mask_token_id, device=device)
        # So wide, it hides the text alone.
        self.block_window = None if window is None else max(window, self.size)

    def taken(self, ops: Ops, features: torch.Tensor) -> torch.Tensor:
        """Return what the layers read of the target's features."""
        return fused(ops, self.drafter, features)

    def fuse(self, ops: Ops, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return the features: tokens are none of a pair's."""
        return features

    def remember(self, ops: Ops, x: torch.Tensor, place: Place, stores: Sequence[Store]) -> None:
        """Store the keys and values of the text under every layer."""
        for layer, store in zip(self.layers, stores, strict=True):
            weights: Any = layer.attention
            stored(ops, weights, x, self.head_dim, place, store)

    def drafted(self, ops: Ops, x: torch.Tensor, level: Level) -> torch.Tensor:
        """Nothing is drafted level by level."""
        raise AssertionError("a block is drafted in one pass")

    def grow(self, root: torch.Tensor, width: int, depth: int) -> Candidates:
        """Return the best paths behind `root`, int64 [B], of `width` tokens of each depth."""
        depth, children = min(depth, self.size - 1), min(width, self.vocabulary)
        # A text's last rounds draft less: one program serves them all.
        deepest = next(one for one in self.depths if one >= depth)
        # No row of a causal head sees a later one: none is run that is not drafted from.
        rows = deepest + 1 if self.causal else self.size
        tokens = torch.cat([root[:, None], self.masks[:, : rows - 1].expand(len(root), -1)], 1)
        inputs = {"tokens": tokens, "prefix": self.target.cache.seqlens}
        key = children, self.budget, self.causal, self.block_window
        if self.growing.in_python:
            best, steps = self.growing.run(key, partial(self._block, children), inputs, len(root))
            paths = best_paths(steps[:, 1 : depth + 1], self.budget)
        else:  # captured with the block: one launch for both
            inputs["depth"] = torch.full_like(root[:1], depth)
            tree = partial(self._tree, children, deepest)
            best, *found = self.growing.run((*key, deepest), tree, inputs, len(root))
            count = min(self.budget, sum(level_bounds(depth, children, self.budget)))
            paths = Paths(*(one[:, :count] for one in found))
        at = (1 + paths.levels) * children + paths.ranks
        return Candidates(
            root,
            best.flatten(1).gather(1, at),
            paths.scores,
            paths.parents,
            lambda: torch.stack([1 + paths.levels, paths.beams()]),
            depth,
            width,
        )

    def _tree(
        self,
        children: int,
        deepest: int,
        ops: Ops,
        tokens: torch.Tensor,
        prefix: torch.Tensor,
        depth: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the best tokens of every row, and the best paths: beyond `depth` [1] last."""
        best, steps = self._block(children, ops, tokens, prefix)
        beyond = torch.arange(deepest, device=depth.device) >= depth
        steps = steps[:, 1 : deepest + 1].masked_fill(beyond[:, None], -torch.inf)
        return best, *best_paths(steps, self.budget)

    def _block(
        self, children: int, ops: Ops, tokens: torch.Tensor, prefix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best tokens of every row, and their log-probabilities: [B, rows, children]."""
        (batch, rows), device = tokens.shape, tokens.device
        places = torch.arange(rows, dtype=torch.int32, device=device)[None]
        seen = torch.ones(rows, rows, dtype=torch.bool, device=device)
        packed = pack_tree_mask(seen.tril() if self.causal else seen)[None].expand(batch, -1, -1)
        place = Place(*self.angles, prefix, places)
        # Rows that see each other see the same text: a window counts from the last of them.
        depths = places if self.causal else torch.full_like(places, self.size - 1)

        def attend(n: int, weights: Any, read: torch.Tensor) -> torch.Tensor:
            (k_text, v_text), own = self.text[n, :, :batch], self.tree[n, :, :batch, :rows]
            store = Store(own, 0)
            q, _, _ = rotated(ops, weights, read, self.head_dim, place, store)
            visible: Any = {"window": self.block_window, "depths": depths}
            return ops.hybrid_tree_attention(q, k_text, v_text, prefix, *own, packed, **visible)

        table: Any = self.target.embed.weight
        x = run_block(ops, self.drafter, self.layers, ops.rows(table, tokens), attend)
        nothing = torch.zeros(batch, rows, device=x.device, dtype=torch.float32)
        return ops.children(self.logits(ops, x), nothing, children)


def layers_of(drafter: DFlashDrafter) -> list[Layer]:
    """Return the weights of a drafter's layers, which may be learning."""
    modules: Any = drafter.layers
    return [drafter_layer(module, drafter.config.head_dim) for module in modules]


def fused(ops: Ops, drafter: DFlashDrafter, features: torch.Tensor) -> torch.Tensor:
    """Return c: what the layers read of the target's features [B, T, layers * H]."""
    return ops.norm(
        ops.linear(features, projection(drafter.fc)), norm_of(drafter.hidden_norm), keep=True
    )


def run_block(
    ops: Ops,
    drafter: DFlashDrafter,
    layers: Sequence[Layer],
    x: torch.Tensor,
    attend: Callable[[int, Any, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return what the target's head reads of rows x [B, T, H], in drafting and in training.

    ``attend(n, weights, read)``: a layer's attention, to the text and to the rows of the block.
    """
    for n, layer in enumerate(layers):
        x = run_layer(ops, n, layer, x, attend, _no_state)
    return ops.norm(x, norm_of(drafter.norm), keep=True)


def _no_state(n: int) -> Any:
    raise AssertionError("a drafter's layer keeps no state")

"""DFlash: draft a block of tokens in one pass, and trees of what is likely at each position.

The rows of a block predict their tokens independently of each other, so a tree combines the first
guesses of all positions: the best paths by the product of their probabilities, grown level by level
(arXiv 2602.06036 drafts chains; arXiv 2604.12989 trees. `specattn.drafters.dflash` has the
equations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from specattn.blocks import Ops, Place, Store, norm_of, projection
from specattn.decoding.drafting.grown import Grown
from specattn.decoding.drafting.pairs import Level, PairBlock, caches_of, level_sizes
from specattn.decoding.drafting.pruning import Candidates
from specattn.decoding.engine.contract import DraftContext
from specattn.decoding.model.parts import drafter_layer
from specattn.decoding.passes.decoder import rotated, run_layer, stored
from specattn.drafters import DFlashDrafter
from specattn.reference.tree_mask import pack_tree_mask


@dataclass(frozen=True)
class DFlash(Grown[DFlashDrafter], name="dflash"):
    """Drafting with DFlash's drafter.

    Parameters
    ----------
    drafter : DFlashDrafter or path, optional
        A drafter, or the folder that holds one, as its authors publish them. By default the folder
        ``dflash`` within the target's. A path is loaded once.
    width, depth, total_tokens, window
        As for `Grown`. A width of 1 drafts chains; no draft is deeper than the drafter's block. A
        window is counted from the block's last row, and is no less than the block.

    Raises
    ------
    ValueError
        A parameter is out of range. From `prepared`, and so when a run starts: there is no drafter,
        or it does not fit the target.
    """

    kind = DFlashDrafter

    depth: int = 15

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return the layers that the drafter reads."""
        return tuple(self.loaded(model).config.feature_layers or ())

    def block(self, context: DraftContext, nodes: int) -> PairBlock:
        """Return the drafter beside the target of a run."""
        return DFlashBlock(self.loaded(context.target.model), context, self.window)


class DFlashBlock(PairBlock):
    """The drafter's layers, with the keys and values that each has of the text.

    Its pair at position t is the feature of token t alone, and the tree's rows are a block's.
    """

    def __init__(self, drafter: DFlashDrafter, context: DraftContext, window: int | None = None):
        self.drafter, config = drafter, drafter.config
        self.size, self.head_dim = config.block_size, config.head_dim
        modules: Any = drafter.layers
        self.layers = [drafter_layer(module, config.head_dim) for module in modules]
        super().__init__(context, *caches_of(drafter, config.layers), self.size, self.size)
        device = context.target.device
        self.masks = torch.full((1, self.size - 1), config.mask_token_id, device=device)
        # Rows of a block see each other, and all the same of the text.
        self.block_window = None if window is None else max(window, self.size)

    def taken(self, ops: Ops, features: torch.Tensor) -> torch.Tensor:
        """Return what the layers read of the target's features."""
        fused = ops.linear(features, projection(self.drafter.fc))
        return ops.norm(fused, norm_of(self.drafter.hidden_norm), keep=True)

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
        """Return all that is scored behind `root`, int64 [B], while a tree of its block grows."""
        depth, children = min(depth, self.size - 1), min(width, self.vocabulary)
        tokens = torch.cat([root[:, None], self.masks.expand(len(root), -1)], 1)
        inputs = {"tokens": tokens, "prefix": self.target.cache.seqlens}
        key, program = (children, self.block_window), partial(self._block, children)
        best, chances = self.growing.run(key, program, inputs)
        scores, sizes = chances.new_zeros(len(root), 1), level_sizes(width, children, depth)
        levels = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]()
        for level, nodes in enumerate(sizes):
            own = best[:, level + 1, None].expand(-1, nodes, -1)
            below = (scores[..., None] + chances[:, level + 1, None]).flatten(1)
            scores, chosen = below.topk(sizes[level + 1] if level + 1 < depth else 0)
            levels.append((own.flatten(1), below, chosen))
        return self.candidates(root, levels, sizes, children, width)

    def _block(
        self, children: int, ops: Ops, tokens: torch.Tensor, prefix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best tokens of every row, and their log-probabilities: [B, size, children]."""
        batch, device = len(tokens), tokens.device
        places = torch.arange(self.size, dtype=torch.int32, device=device)[None]
        whole = torch.ones(self.size, self.size, dtype=torch.bool, device=device)
        place, seen = Place(*self.angles, prefix, places), pack_tree_mask(whole)[None]
        seen, last = seen.expand(batch, -1, -1), torch.full_like(places, self.size - 1)

        def attend(n: int, weights: Any, read: torch.Tensor) -> torch.Tensor:
            (k_text, v_text), (k_own, v_own) = self.text[n, :, :batch], self.tree[n, :, :batch]
            store = Store(self.tree[n, :, :batch], 0)
            q, _, _ = rotated(ops, weights, read, self.head_dim, place, store)
            visible: Any = {"window": self.block_window, "depths": last}
            return ops.hybrid_tree_attention(
                q, k_text, v_text, prefix, k_own, v_own, seen, **visible
            )

        table: Any = self.target.embed.weight
        x = ops.rows(table, tokens)
        for n, layer in enumerate(self.layers):
            x = run_layer(ops, n, layer, x, attend, _no_state)
        x = ops.norm(x, norm_of(self.drafter.norm), keep=True)
        nothing = torch.zeros(batch, self.size, device=x.device, dtype=torch.float32)
        return ops.children(self.logits(ops, x), nothing, children)


def _no_state(n: int) -> Any:
    raise AssertionError("a drafter's layer keeps no state")

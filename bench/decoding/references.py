"""A written-down continuation plays the target: simulated acceptance for requests beyond a model.

The model reads the prompt, then the reference in one pass, and no draft. A verification looks up
what was read: at the nodes whose path is the reference so far, the reference's next token stands
above all others, and the ranks below it are the model's own. So greedy decoding writes the
reference whatever is drafted, and what is accepted is what a drafter foresaw of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from specattn.decoding import Target
from specattn.decoding.passes.attention import NO_CAPTURE, CaptureSpec
from specattn.decoding.passes.runner import Verification
from specattn.tree import Tree

from .simulation import CERTAIN, MARK

NOTE = f"{MARK} reference text"


class ReferenceTarget(Target):
    """A target whose greedy text is given for every request, for drafters that need text and ranks.

    What the model would rank behind a token that is not the reference's is not known. There the
    ranks are those that it gave when this token was last read in the reference, so that a drafter
    which keeps ranks by token learns nothing new from it.

    Parameters
    ----------
    model, batch, capacity
        As for `Target`.
    references : B Tensors, int64 [n]
        What follows each prompt, all of one length; no more is decoded.

    Attributes
    ----------
    agreement : float
        Share of the references' tokens that the model itself ranked first.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        capacity: int,
        *,
        references: Sequence[torch.Tensor],
    ):
        super().__init__(model, batch, capacity)
        self.references = torch.stack(list(references))
        self.start: list[int] = []
        self.agreement = 0.0

    def verify(
        self,
        tree: Tree,
        tokens: torch.Tensor,
        *,
        capture: CaptureSpec = NO_CAPTURE,
        reuse_buffers: bool = False,
    ) -> Verification:
        """Return what the model said when it read the reference, with the reference on top.

        Raises
        ------
        ValueError
            More than logits is asked for.
        """
        if capture != NO_CAPTURE:
            raise ValueError("a reference has logits, but neither scores nor queries")
        if not self.start:
            self._read(tokens[:, 0])
        logits = self.logits.new_zeros(*tokens.shape, self.logits.shape[-1])
        parents = tree.parent_lists * (len(tokens) if len(tree.parent_lists) == 1 else 1)
        committed = self.cache.seqlens.tolist()
        for request, row in enumerate(tokens.tolist()):
            place = committed[request] - self.start[request]
            reference = self.references[request].tolist()
            met = {token: at + 1 for at, token in enumerate(reference[:place])}
            for node, token in enumerate(row):
                if token in met and met[token] < len(reference):
                    logits[request, node] = self.logits[request, met[token]]
            for node, depth in on_reference(parents[request], row, reference[place:]):
                logits[request, node] = self.logits[request, place + depth]
                logits[request, node, reference[place + depth]] = CERTAIN
        return Verification(logits, logits.new_empty(*tokens.shape, 0))

    def _read(self, roots: torch.Tensor) -> None:
        """Read the references behind the roots, which are the prompts' last tokens."""
        references = self.references.to(roots.device)
        read = torch.cat([roots[:, None], references[:, :-1]], 1)
        self.logits = super().verify(Tree.chain(read.shape[1] - 1), read).logits.clone()
        self.start = self.cache.seqlens.tolist()
        self.agreement = (self.logits.argmax(-1) == references).double().mean().item()


def on_reference(
    parents: Sequence[int], tokens: Sequence[int], expected: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the nodes of a tree on the reference's path, each with its depth.

    Parameters
    ----------
    parents, tokens : sequence of int
        Of the tree's nodes; node 0 is the root, whose token is committed.
    expected : sequence of int
        What the reference has behind the root.
    """
    depths = {0: 0}
    for node in range(1, len(parents)):
        depth = depths.get(parents[node])
        if depth is not None and depth < len(expected) and tokens[node] == expected[depth]:
            depths[node] = depth + 1
    return [(node, depth) for node, depth in depths.items() if depth < len(expected)]

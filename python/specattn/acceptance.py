"""Acceptance of drafted tokens by rules that leave the target's distribution unchanged.

Two rules, both exact for every draft, good or bad.

*The draft was chosen deterministically* (argmax, top-k, n-grams, beams): one sample of the target
is drawn per step and emitted, whatever was drafted; while it is also the token of a drafted child,
the walk goes on. What is emitted is thus the target's own sample: how many nodes carry a token does
not change its probability.

*The children were sampled* from a draft distribution q, one after the other, without replacement:
child x is accepted with probability min(1, p(x) / q(x)); after a rejection p becomes the normalised
residual max(p - q, 0), q loses x and is normalised again, and the next child is tried. When no
child is left the next token comes from the p that remains. (Leviathan et al. 2023, §2.3 for one
child; Jeon et al. 2024, "Recursive speculative decoding", for several.)

All arithmetic is done in float64, one row of the vocabulary per request at a time. Loops run over
the depth and the width of the tree, which the host knows, so nothing waits for the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from .tree import Tree

__all__ = [
    "Accepted",
    "accept",
    "accept_samples",
    "sample",
    "sample_children",
    "walk",
]

Draw = Callable[[torch.Tensor], torch.Tensor]
"""Draws one index per row from rows of weights: [B, n] -> [B]."""

SampleAt = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Draws the target's token after a node of every request, given its path; see `walk`."""

_TINY = torch.finfo(torch.float64).tiny


class Accepted(NamedTuple):
    """What one verification emits: the tokens of the accepted nodes, then `next_token`.

    Attributes
    ----------
    nodes : Tensor, int64 [B, max_depth]
        The accepted nodes along one path, from the root's child downwards, then -1.
    counts : Tensor, int64 [B]
        How many nodes were accepted, from 0 to ``max_depth``.
    next_token : Tensor, int64 [B]
        The token that follows the last accepted node (the *bonus token*). It is committed but not
        yet in the cache: the root of the next tree.
    """

    nodes: torch.Tensor
    counts: torch.Tensor
    next_token: torch.Tensor

    @property
    def last(self) -> torch.Tensor:
        """Int64 [B]: the last accepted node, the root where none was accepted."""
        path = torch.nn.functional.pad(self.nodes, (1, 0))
        return path.gather(1, self.counts[:, None])[:, 0]


@torch.no_grad()
def accept(
    tree: Tree,
    tokens: torch.Tensor,
    target_probs: torch.Tensor,
    *,
    draft_probs: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Accepted:
    """Walk down the tree as far as the target agrees, and draw the token that comes next.

    The emitted tokens (those of the accepted nodes, then the next token) have the distribution of
    plain decoding with the target, whatever was drafted.

    Parameters
    ----------
    tree : Tree
        One tree of T nodes for all requests, or a batch of B trees. Padding is never accepted.
    tokens : Tensor, int32 or int64 [B, T]
        The drafted tokens. Those of the root and of padding are not read.
    target_probs : Tensor, floating point [B, T, V]
        The target's probabilities of the token that follows each node, given the node's path,
        after temperature, filters and penalties. One-hot rows make the decoding greedy
        (`accept_samples` does the same from the argmax alone). Rows need not be normalised.
    draft_probs : Tensor, floating point [B, T, V], optional
        Row n is the distribution from which the children of node n were sampled, after all that
        shaped it: the very numbers, not recomputed ones. The children must be true samples in the
        order of their index, without replacement (`sample_children`), and all of them: choosing
        among samples by their probability, as dynamic trees do, makes the draft deterministic. A
        child that its row cannot have produced (probability 0, or the same token as an earlier
        sibling) is passed over, so independent samples are fine too. Rows of leaves are not read.
        None: the draft was chosen deterministically.
    generator : torch.Generator, optional
        Source of randomness on the device of `target_probs`; default: that device's own.

    Returns
    -------
    Accepted

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong dtype, shape or device. With ``SPECATTN_CHECK=1`` also a row that
        is read and is no distribution: NaN, infinite or negative, or of the target without mass.
    """
    _check_shapes(tree, tokens, target_probs=target_probs, draft_probs=draft_probs)
    if os.environ.get("SPECATTN_CHECK") == "1":
        _check_rows("target_probs", target_probs, tree.valid, needs_mass=True)
        if draft_probs is not None:
            followed = tree.valid & ~tree.is_leaf
            _check_rows("draft_probs", draft_probs, followed, needs_mass=False)
    draw = partial(sample, generator=generator)
    if draft_probs is None:
        return walk(tree, tokens, lambda node, _: draw(_rows(target_probs, node)))
    return _try_children(tree, tokens.long(), target_probs, draft_probs, draw)


def accept_samples(tree: Tree, tokens: torch.Tensor, samples: torch.Tensor) -> Accepted:
    """Walk down the tree along samples of the target that were drawn already, one per node.

    With ``samples = logits.argmax(-1)`` this is greedy acceptance without a probability table.
    It is exact for drafts chosen deterministically, as `accept` without `draft_probs`, when the
    sample of each node was drawn independently of the others.

    Parameters
    ----------
    tree, tokens
        As for `accept`.
    samples : Tensor, int64 [B, T]
        The token that the target puts after each node.

    Returns
    -------
    Accepted

    Examples
    --------
    The target puts 7 behind the root, which was drafted, and 8 behind that, which was not:

    >>> tokens, samples = torch.tensor([[1, 7, 5]]), torch.tensor([[7, 8, 9]])
    >>> accepted = accept_samples(Tree([-1, 0, 0]), tokens, samples)
    >>> accepted.nodes.tolist(), accepted.counts.tolist(), accepted.next_token.tolist()
    ([[1]], [1], [8])
    """
    _check_shapes(tree, tokens, samples=samples)
    return walk(tree, tokens, lambda node, _: samples.gather(-1, node[:, None])[:, 0].long())


def walk(tree: Tree, tokens: torch.Tensor, sample_at: SampleAt) -> Accepted:
    """Walk down the tree along samples of the target that are drawn where the walk comes by.

    It is exact for drafts chosen deterministically, as `accept` without `draft_probs`, and needs
    the target's distribution at one node per level instead of all nodes.

    Siblings may carry the same token: the walk keeps every node whose path reads as what has been
    emitted, so no continuation is lost. All of them have the same context, hence the same
    distribution.

    Parameters
    ----------
    tree, tokens
        As for `accept`.
    sample_at : callable
        ``sample_at(node, emitted)`` draws the token that the target puts after each request's
        `node`, int64 [B]; `emitted`, int64 [B, depth], are the tokens of its path, the root's
        apart. It is called once per level. A request that has left the tree before is asked about
        its last node again, with -1 behind its path; the answer is dropped.

    Returns
    -------
    Accepted
    """
    parents = tree.parents.expand(len(tokens), -1)
    reached = torch.zeros_like(parents, dtype=torch.bool)
    reached[:, 0] = True
    node = parents.new_zeros(len(tokens))
    emitted = tokens.new_empty(len(tokens), 0, dtype=torch.int64)
    next_token = sample_at(node, emitted)
    for _ in range(tree.max_depth):
        below = reached.gather(-1, parents.clamp_min(0)) & (parents >= 0)
        reached = below & (tokens == next_token[:, None])
        goes_on = reached.any(-1)
        node = torch.where(goes_on, reached.int().argmax(-1), node)
        emitted = torch.cat([emitted, torch.where(goes_on, next_token, -1)[:, None]], 1)
        next_token = torch.where(goes_on, sample_at(node, emitted), next_token)
    return _accepted(tree, node, next_token)


def sample(probs: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw one index from every row of `probs` without waiting for the device.

    Parameters
    ----------
    probs : Tensor, floating point [..., V]
        Weights that need not be normalised. An index of weight 0 is never drawn.
    generator : torch.Generator, optional
        Source of randomness on the device of `probs`.

    Returns
    -------
    Tensor, int64 [...]
    """
    return _race(probs, generator).argmax(-1)


def sample_children(
    probs: torch.Tensor, k: int, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw `k` different indices from every row of `probs`, one after the other.

    Each is drawn from what the earlier ones left over, as `accept` expects of siblings. Where a row
    has fewer than `k` indices of positive weight, the rest are indices of weight 0, which `accept`
    passes over.

    Parameters
    ----------
    probs : Tensor, floating point [..., V]
        Weights that need not be normalised.
    k : int
        From 1 to V.
    generator : torch.Generator, optional
        Source of randomness on the device of `probs`.

    Returns
    -------
    Tensor, int64 [..., k]
        In the order in which they were drawn.
    """
    if not 1 <= k <= probs.shape[-1]:
        raise ValueError(f"k must be from 1 to the vocabulary of {probs.shape[-1]}, got {k}")
    return _race(probs, generator).topk(k, dim=-1).indices


def _race(probs: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Speeds in a race that index i wins with probability ``probs[i] / probs.sum()``.

    The arrival time of i is exponential with rate ``probs[i]``, and the order of arrival is that of
    drawing without replacement. The winner arrives near 0, where float32 times are multiples of
    2**-24 and an index rarer than that would never win: hence float64.
    """
    noise = torch.rand(probs.shape, dtype=torch.float64, device=probs.device, generator=generator)
    arrival = noise.clamp_min_(_TINY).log_().neg_()  # never 0, and finite: mass always beats none
    return probs / arrival


def _try_children(
    tree: Tree,
    tokens: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    draw: Draw,
) -> Accepted:
    """Accept or reject sampled children one by one; see the rule at the top of this file."""
    requests = torch.arange(len(tokens), device=tokens.device)
    children = tree.children.expand(len(tokens), -1, -1)
    node = torch.zeros_like(requests)
    p = _normalised(_rows(target_probs, node))
    goes_on = torch.ones_like(requests, dtype=torch.bool)
    for _ in range(tree.max_depth):
        q = _normalised(_rows(draft_probs, node))
        undecided = goes_on
        next_node = node
        for child in children[requests, node].unbind(-1):
            token = tokens.gather(-1, child.clamp_min(0)[:, None])
            token = torch.where(child[:, None] < 0, 0, token)
            p_x, q_x = p.gather(-1, token)[:, 0], q.gather(-1, token)[:, 0]
            tried = undecided & (child >= 0) & (q_x > 0)
            weights = torch.stack([(q_x - p_x).clamp_min(0), torch.minimum(p_x, q_x)], dim=-1)
            accepted = tried & (draw(weights) == 1)
            rejected = tried & ~accepted
            next_node = torch.where(accepted, child, next_node)
            undecided = undecided & ~accepted
            p, q = _after_rejection(p, q, token, rejected)
        goes_on = goes_on & ~undecided
        node = next_node
        p = torch.where(goes_on[:, None], _normalised(_rows(target_probs, node)), p)
    return _accepted(tree, node, draw(p))


def _after_rejection(
    p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, rejected: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the residual of p, and q without the rejected token, in the rows that rejected it."""
    residual = (p - q).clamp_min(0)
    # Where p and q differ by rounding alone nothing may be left over; p itself is then as good.
    has_mass = residual.sum(-1) > 0
    p = torch.where((rejected & has_mass)[:, None], _normalised(residual), p)
    q = torch.where(rejected[:, None], _normalised(q.scatter(-1, token, 0.0)), q)
    return p, q


def _rows(probs: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
    """Return the row of each request's node: [B, T, V], [B] -> [B, V]."""
    return probs[torch.arange(len(node), device=node.device), node]


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    """Return rows normalised in float64; a row without mass stays without."""
    weights = weights.double()
    return weights / weights.sum(-1, keepdim=True).clamp_min(_TINY)


def _accepted(tree: Tree, node: torch.Tensor, next_token: torch.Tensor) -> Accepted:
    """Return the path to each request's last accepted node with the token after it."""
    requests = torch.arange(len(node), device=node.device)
    paths = tree.paths.expand(len(node), -1, -1)[requests, node]
    return Accepted(paths[:, 1:], (paths[:, 1:] >= 0).sum(-1), next_token)


def _check_rows(name: str, probs: torch.Tensor, read: torch.Tensor, *, needs_mass: bool) -> None:
    """Raise ValueError naming the first of the rows `read` that is no distribution."""
    faults = {
        "a finite number everywhere": ~probs.isfinite().all(-1),
        "nothing negative": (probs < 0).any(-1),
        "some mass": (probs.sum(-1) == 0) & needs_mass,
    }
    for expected, broken in faults.items():
        if (broken := broken & read).any():
            request, node = broken.nonzero()[0].tolist()
            raise ValueError(
                f"{name}[{request}, {node}]: expected {expected}, got a row from "
                f"{probs[request, node].min()} to {probs[request, node].max()}"
            )


def _check_shapes(tree: Tree, tokens: torch.Tensor, **tables: torch.Tensor | None) -> None:
    """Raise where the arguments do not fit together, naming what was expected and what came."""
    if tokens.dim() != 2 or tokens.shape[1] != tree.size:
        raise ValueError(f"tokens must be [B, T = {tree.size}], got {list(tokens.shape)}")
    if tree.batch_size not in (None, len(tokens)):
        raise ValueError(f"tree has {tree.batch_size} trees for {len(tokens)} rows of tokens")
    tables = {"tokens": tokens, **tables}
    vocabulary = None
    for name, table in tables.items():
        if table is None:
            continue
        is_law = name.endswith("probs")
        if table.is_floating_point() != is_law or table.dtype == torch.bool:
            kind = "floating point" if is_law else "integer"
            raise TypeError(f"{name} must be {kind}, got {table.dtype}")
        expected = [*tokens.shape] + ([vocabulary or table.shape[-1]] if is_law else [])
        if list(table.shape) != expected:
            raise ValueError(f"{name} must be {expected}, got {list(table.shape)}")
        if table.device != tree.device:
            raise ValueError(f"{name} is on {table.device}, the tree on {tree.device}")
        vocabulary = table.shape[-1] if is_law else vocabulary

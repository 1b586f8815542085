"""Draws behind all nodes of a tree at once, the walk along them, and what the host is told of it.

On a GPU nothing of this waits: a round is drawn, walked and committed before its report is read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from specattn.acceptance import Accepted, walk
from specattn.backends.select import chosen
from specattn.decoding.text.statistics import Clock
from specattn.ops import add_gumbel_noise
from specattn.tree import Tree


class Outcome(NamedTuple):
    """What became of a request's draft: its tokens and levels; the accepted path and one more."""

    drafted: int
    depth: int
    tokens: list[int]


class Report:
    """What became of every request's draft, of which the host knows."""

    def __init__(self, outcomes: list[Outcome]):
        self._outcomes = outcomes

    @property
    def counts(self) -> list[int] | None:
        """How many nodes each request accepted, or None where the host would have to wait."""
        return [len(outcome.tokens) - 1 for outcome in self._outcomes]

    def send(self) -> None:
        """Enqueue the copy to the host; what was enqueued before is there with it."""

    def read(self) -> list[Outcome]:
        """Return the outcomes; waits until they are there."""
        return self._outcomes


class CopiedReport(Report):
    """A report that a device has written, int64 [B, 4 + depth], which is sent to the host.

    Of each request the next token, how many nodes were drafted and are accepted, how deep the tree
    went, and the accepted tokens: what kernels read, the token and the count, lies at whole 16
    bytes.
    """

    def __init__(self, rows: torch.Tensor):
        self._rows, self._clock, self._sent = rows, Clock(rows.device), None

    def send(self) -> None:
        """Enqueue the copy to the host."""
        self._rows, self._sent = downloaded(self._rows), self._clock.now()

    @property
    def counts(self) -> None:
        """Not known before the report is read."""
        return None

    def read(self) -> list[Outcome]:
        """Return the outcomes; waits for the copy, not for what was enqueued behind it."""
        if self._sent is None:
            self.send()
        self._clock.wait(self._sent)
        return [
            Outcome(drafted, depth, [*path[:count], token])
            for token, drafted, count, depth, *path in self._rows.tolist()
        ]


def uploaded(values: Any, device: torch.device, **options: Any) -> torch.Tensor:
    """Return a tensor of numbers on a device, copied in its stream: the host does not wait."""
    on_gpu = device.type != "cpu"
    tensor = torch.tensor(values, device="cpu", pin_memory=on_gpu, **options)
    return tensor.to(device, non_blocking=True) if on_gpu else tensor


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, copied there in its stream: the host does not wait."""
    if device.type == "cpu" or x.device.type != "cpu":
        return x.to(device)
    kept = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    return kept.copy_(x).to(device, non_blocking=True)


def downloaded(x: torch.Tensor) -> torch.Tensor:
    """Return where a device's tensor is copied to on the host, in its stream: nothing waits."""
    if x.device.type == "cpu":
        return x
    kept = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    return kept.copy_(x, non_blocking=True)


def signed(seed: int) -> int:
    """Return a seed as a signed number of 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


class Draws(NamedTuple):
    """How tokens are drawn from logits [B, T, V], or from scores that were made of them.

    Attributes
    ----------
    places : Tensor, int64 [2, B]
        Rows of the requests, and the lengths of their texts: what their noise follows from.
    seed : int or None
        None: greedily.
    temperatures : Tensor, float32 [B], or None
        By which logits are divided.
    """

    places: torch.Tensor
    seed: int | None
    temperatures: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """Return the token behind every node, [B, T]: -1 where there is none.

        `depths`, integer [T] or [B, T], are the nodes' own.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.temperatures is not None:
            scores = scores / self.temperatures[:, None, None]
        if self.seed is not None:
            rows, lengths = self.places[:, :, None]
            positions = lengths + depths
            places = rows.repeat(1, positions.shape[1]).flatten(), positions.flatten()
            noisy = add_gumbel_noise(scores.float().flatten(0, 1), self.seed, *places)
            scores = noisy.view(scores.shape)
        best, drawn = scores.max(-1)
        return drawn.masked_fill(best.isnan() | (best == -torch.inf), -1)


def draw_and_walk(
    tree: Tree, tokens: torch.Tensor, logits: torch.Tensor, draws: Draws
) -> tuple[Accepted, torch.Tensor]:
    """Draw behind every node of a tree, walk along what was drawn; return the report's rows too.

    The same as `specattn.acceptance.walk` with a draw for each level, since noise belongs to a
    position: `tokens` are int64 [B, T]. By Triton's kernels where they make the noise.
    """
    _, backend = chosen("add_gumbel_noise", logits.device, logits.dtype)
    if backend.name != "triton" or logits.stride(-1) != 1:
        drawn = draws(logits, tree.depths)
        accepted = walk(tree, tokens, lambda node, _: drawn.gather(1, node[:, None])[:, 0])
        return accepted, report_of(tree, tokens, accepted)
    from specattn.triton_kernels.draw import draw_and_walk as launched  # needs triton

    nodes = tokens.new_empty(len(tokens), tree.max_depth)
    report = tokens.new_empty(len(tokens), 4 + tree.max_depth)
    parents, depths = (x.view(-1, tree.size) for x in (tree.parents, tree.depths))
    seed = None if draws.seed is None else signed(draws.seed)
    given = logits, tokens, parents, depths, draws.temperatures, draws.places, seed
    launched(*given, nodes, report)
    return Accepted(nodes, report[:, 2], report[:, 0]), report


def report_of(tree: Tree, tokens: torch.Tensor, accepted: Accepted) -> torch.Tensor:
    """Return the rows of a `CopiedReport` of a walk."""
    nodes, counts, next_token = accepted
    path = tokens.gather(1, nodes.clamp_min(0)).masked_fill(nodes < 0, -1)
    drafted, depth = (x.expand_as(counts) for x in (tree.valid.sum(-1) - 1, tree.depths.amax(-1)))
    return torch.cat([torch.stack([next_token, drafted, counts, depth], 1), path], 1)

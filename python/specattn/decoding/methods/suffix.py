"""Suffix decoding: draft a tree of what followed the text's end where it occurred before.

A suffix automaton over prompt and output finds all earlier occurrences of the longest matching
ends, as the text grows. What has no match is drafted from Token Recycling's table. (Oliaro et al.,
*SuffixDecoding*, arXiv 2411.04975; Luo et al., *Turning Trash into Treasure*, arXiv 2408.08696.)
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specattn.decoding.drafting import Draft, DraftContext, Drafter, Verified
from specattn.decoding.method import Method
from specattn.decoding.methods.corpus import corpora_of
from specattn.decoding.methods.costs import SIZES, Calibration, best_size, costs_of
from specattn.decoding.methods.trie import shared_tree
from specattn.decoding.sequences import RequestIndexes


@dataclass(frozen=True)
class Suffix(Method, name="suffix"):
    """Drafting from the text's own repetitions, in trees as large as pays.

    The most probable paths are drafted first. A path's probability is learned from the text itself:
    how often a match of that length was continued as before, and how often each continuation came.

    Parameters
    ----------
    nodes : int or None
        Drafted tokens per round. None: up to 64, as many as gain the most tokens per second by the
        times of the run's own passes, or none.
    depth : int
        Longest path.
    recycling : bool
        Whether what has no match is drafted from a table of the target's own rankings.
    k : int
        Successors that the table keeps of each token.
    corpus : sequence of path
        Files of UTF-8 that are looked up beside the text; its own matches win at equal length.
    remember : bool
        Whether what this process generated with the model before is looked up too: its newest
        `corpus.REMEMBERED` tokens.
    cache : path, optional
        Folder where indexes of `corpus` are kept for other processes, and outputs with `remember`.

    Raises
    ------
    ValueError
        A parameter is out of range. When a run starts: a file of `corpus` cannot be read, or the
        model has no tokenizer for it.
    RuntimeError
        The C++ module is not built.
    """

    nodes: int | None = None
    depth: int = 32
    recycling: bool = True
    k: int = 8
    corpus: tuple[Path, ...] = ()
    remember: bool = False
    cache: Path | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "k"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if isinstance(self.corpus, str | Path):
            raise ValueError(f"corpus must be a sequence of paths, got {self.corpus!r}")
        if self.cache is not None and not (self.corpus or self.remember):
            raise ValueError("cache needs corpus or remember")

    def prepared(self, model: PreTrainedModel) -> Suffix:
        """Return this method with its corpora read."""
        self.corpora(model)
        return self

    def corpora(self, model: PreTrainedModel) -> list[Any]:
        """Return what is looked up beside a text."""
        if not (self.corpus or self.remember):
            return []
        known = corpora_of(model)
        found = known.files(self.corpus, self.cache)
        return found + ([known.remembered(self.cache)] if self.remember else [])

    @property
    def max_nodes(self) -> int:
        """The root and the drafted tokens."""
        return SIZES[-1] if self.nodes is None else self.nodes + 1

    def clipped(self, depth: int) -> Suffix:
        """Return this method with no longer paths than `depth`, and 1 at least."""
        return replace(self, depth=max(1, min(self.depth, depth)))

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter that has read the prompts."""
        return _SuffixDrafter(self, context)


class _SuffixDrafter(Drafter):
    def __init__(self, method: Suffix, context: DraftContext):
        try:
            native: Any = importlib.import_module("specattn._cpu")
        except ImportError:
            raise RuntimeError("suffix: specattn._cpu is not built, which has its index") from None
        self.method, self.sequences, target = method, context.sequences, context.target
        self.model = target.model
        self.successors: torch.Tensor | None = None
        if method.recycling:
            size = target.model.config.vocab_size, min(method.k, target.model.config.vocab_size)
            self.successors = torch.full(size, -1, dtype=torch.int32)

        corpora = method.corpora(target.model)
        self.running = list(context.sequences.active)

        def index() -> Any:
            return _Index(native.SuffixDrafter(corpora), self.successors)

        self.indexes = RequestIndexes(context.sequences, index, prompts=True)
        self.costs = costs_of(target, context.sequences)
        self.calibration = Calibration()
        self.expected: list[float] = []

    def propose(self, root: torch.Tensor) -> Draft:
        sizes = self.costs.estimates() if self.method.nodes is None else None
        most = max(sizes) - 1 if sizes is not None else self.method.nodes
        trees = [
            index.draft(most, min(self.method.depth, self.sequences.drafts(row)))
            for row, index in zip(self.sequences.active, self.indexes.active, strict=True)
        ]
        if sizes is not None:
            found = [probabilities for _, _, probabilities in trees]
            rows = best_size(sizes, found, self.calibration.factor)
            trees = [tuple(part[: rows - 1] for part in tree) for tree in trees]
        size = 1 + max(len(tokens) for _, tokens, _ in trees)
        self.expected = [sum(probabilities) for *_, probabilities in trees]
        shapes = tuple((-1, *(parent + 1 for parent in parents)) for parents, _, _ in trees)
        drafted = torch.tensor(
            [[0, *tokens, *[0] * (size - 1 - len(tokens))] for _, tokens, _ in trees]
        )
        drafted = drafted.to(root.device)
        drafted[:, 0] = root
        self.costs.begin(size)
        return Draft(shared_tree(shapes, root.device), drafted)

    def observe(self, verified: Verified) -> None:
        self.costs.end()
        counts = verified.accepted.counts.tolist()
        for expected, count in zip(self.expected, counts, strict=True):
            self.calibration.add(expected, count)
        self.indexes.catch_up()  # before the table knows what came
        if self.successors is not None:
            self._recycle(verified, max(counts))

    def compact(self, rows: list[int]) -> None:
        if not self.method.remember:
            return
        known = corpora_of(self.model)
        for row in set(self.running) - set(self.sequences.active):
            known.outputs.add(self.sequences.new_tokens(row))
        self.running = list(self.sequences.active)
        if self.method.cache is not None and not self.running:
            known.keep(self.method.cache)

    def _recycle(self, verified: Verified, deepest: int) -> None:
        """Keep what the target ranked best after the tokens that stay."""
        assert self.successors is not None
        nodes = verified.accepted.nodes[:, :deepest]
        nodes = torch.cat([torch.zeros_like(verified.accepted.counts)[:, None], nodes], 1)
        nodes = nodes.clamp_min(0)  # where a request's path is shorter: its root once more
        logits = verified.result.logits
        at_nodes = logits.gather(1, nodes[..., None].expand(-1, -1, logits.shape[-1]))
        ranked = at_nodes.topk(self.successors.shape[1]).indices
        tokens = verified.draft.tokens.gather(1, nodes).flatten()
        # numpy's assignment keeps the last of a token's rows.
        self.successors.numpy()[tokens.numpy(force=True)] = ranked.flatten(0, 1).numpy(force=True)

    def details(self) -> dict[str, Any]:
        """Return what passes were found to cost, and how true the expectations were."""
        if self.method.nodes is not None:
            return {}
        costs = {str(rows): round(1e3 * s, 2) for rows, s in self.costs.measured.items()}
        return {
            "ms per pass, by rows": costs,
            "accepted per expected": round(self.calibration.factor, 3),
        }


class _Index:
    """One request's automaton, with the table that all requests share."""

    def __init__(self, native: Any, successors: torch.Tensor | None):
        self.native, self.successors = native, successors

    def extend(self, tokens: list[int]) -> None:
        self.native.extend(tokens, self.successors)

    def draft(self, nodes: int, depth: int) -> tuple[list[int], list[int], list[float]]:
        tree: tuple[list[int], list[int], list[float]]
        tree = self.native.draft(nodes, depth, 0.0, self.successors)
        return tree

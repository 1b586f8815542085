"""Suffix decoding: draft a tree of what followed the text's end where it occurred before.

A suffix automaton over prompt and output finds all earlier occurrences of the longest matching
ends, as the text grows. What has no match is drafted from Token Recycling's table. (Oliaro et al.,
*SuffixDecoding*, arXiv 2411.04975; Luo et al., *Turning Trash into Treasure*, arXiv 2408.08696.)
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from specattn.decoding.drafting import Draft, DraftContext, Drafter, Verified
from specattn.decoding.method import Method
from specattn.decoding.methods.corpus import corpora_of
from specattn.decoding.methods.costs import SIZES, Calibration, costs_of
from specattn.decoding.methods.trie import shared_tree
from specattn.decoding.sequences import RequestIndexes
from specattn.tree import Tree

MOST_SUCCESSORS = 64
"""As many as csrc/cpu/ranked.h keeps."""


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
        if self.k > MOST_SUCCESSORS:
            raise ValueError(f"k must be at most {MOST_SUCCESSORS}, got {self.k}")
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

    def start(self, context: DraftContext) -> SuffixDrafter:
        """Return a drafter that has read the prompts."""
        try:
            native: Any = importlib.import_module("specattn._cpu")
        except ImportError:
            raise RuntimeError("suffix: specattn._cpu is not built, which has its index") from None
        return SuffixDrafter(self, context, native)


class Lookup(NamedTuple):
    """What a round would draft, before it is known that it shall.

    Attributes
    ----------
    trees : per request: parents (-1 the root), tokens and probabilities of the drafted nodes
    seconds : float
        What the pass is expected to take.
    tokens : list of float
        What it is expected to emit to each request, the bonus token included.
    saved : float
        Seconds that it is expected to save over passes without a draft.
    """

    trees: list[tuple[list[int], list[int], list[float]]]
    seconds: float
    tokens: list[float]
    saved: float


class SuffixDrafter(Drafter):
    """Drafts from the text's own repetitions.

    Between `find` and `draft` another drafter may turn out to be faster; its round is followed.

    Parameters
    ----------
    method : Suffix
    context : DraftContext
    native : module
        `specattn._cpu`, or what has as good a `SuffixDrafter`.
    """

    def __init__(self, method: Suffix, context: DraftContext, native: Any):
        self.native = native
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
        self.root_alone = Tree.chain(0, device=target.device)

    def find(self) -> Lookup:
        """Return what is worth drafting now."""
        rows = self.sequences.active
        depths = [min(self.method.depth, self.sequences.drafts(row)) for row in rows]
        indexes = [index.native for index in self.indexes.active]
        factor, seconds, row_seconds = self.calibration.factor, math.nan, math.nan
        if (nodes := self.method.nodes) is None:
            sizes = self.costs.estimates()
            size, trees = self.native.best_trees(
                indexes, depths, list(sizes), list(sizes.values()), factor, self.successors
            )
            seconds, row_seconds = sizes[size], sizes[1]
        else:
            trees = [
                index.draft(nodes, depth, 0.0, self.successors)
                for index, depth in zip(indexes, depths, strict=True)
            ]
        tokens = [1 + factor * sum(chances) for *_, chances in trees]
        saved = sum(tokens) / len(tokens) * row_seconds - seconds
        return Lookup(trees, seconds, tokens, saved)

    def draft(self, root: torch.Tensor, lookup: Lookup) -> Draft:
        """Return what was found as a draft behind `root` [B]."""
        trees = lookup.trees
        size = 1 + max(len(tokens) for _, tokens, _ in trees)
        self.expected = [sum(chances) for *_, chances in trees]
        self.costs.begin(size)
        if size == 1:
            return self.nothing(root)
        shapes = tuple((-1, *(parent + 1 for parent in parents)) for parents, _, _ in trees)
        roots = self.sequences.newest
        drafted = [
            [newest, *tokens, *[0] * (size - 1 - len(tokens))]
            for newest, (_, tokens, _) in zip(roots, trees, strict=True)
        ]
        tokens = torch.from_numpy(np.array(drafted)).to(root.device)  # quicker than torch.tensor
        return Draft(shared_tree(shapes, root.device), tokens)

    def nothing(self, root: torch.Tensor) -> Draft:
        """Return `root` [B] alone as a draft."""
        return Draft(self.root_alone, root[:, None])

    def propose(self, root: torch.Tensor) -> Draft:
        """Draft behind `root` [B]."""
        return self.draft(root, self.find())

    def observe(self, verified: Verified) -> None:
        """Learn from the verification of an own draft."""
        self.costs.end()
        for expected, count in zip(self.expected, verified.counts, strict=True):
            self.calibration.add(expected, count)
        self.follow(verified)

    def follow(self, verified: Verified) -> None:
        """Learn from the verification of another drafter's draft."""
        self.indexes.catch_up()  # before the table knows what came
        if self.successors is not None:
            self._recycle(verified)

    def compact(self, rows: list[int]) -> None:
        """Remember what finished requests have been given."""
        if not self.method.remember:
            return
        known = corpora_of(self.model)
        for row in set(self.running) - set(self.sequences.active):
            known.outputs.add(self.sequences.new_tokens(row))
        self.running = list(self.sequences.active)
        if self.method.cache is not None and not self.running:
            known.keep(self.method.cache)

    def _recycle(self, verified: Verified) -> None:
        """Keep what the target ranked best after the tokens that stay."""
        assert self.successors is not None
        logits, tokens = verified.result.logits, verified.draft.tokens
        if logits.device.type == "cpu":
            logits = logits.float() if logits.dtype == torch.float64 else logits
            self.native.rank_successors(logits, tokens, verified.accepted.nodes, self.successors)
            return
        size = verified.draft.tree.size
        visited = [
            request * size + node
            for request, path in enumerate(verified.accepted.nodes.tolist())
            for node in (0, *path)
            if node >= 0
        ]
        rows = torch.tensor(visited, device=tokens.device)
        best = logits.flatten(0, 1).index_select(0, rows).topk(self.successors.shape[1]).indices
        tokens = tokens.flatten().index_select(0, rows)
        # numpy's assignment keeps the last of a token's rows.
        self.successors.numpy()[tokens.numpy(force=True)] = best.numpy(force=True)

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

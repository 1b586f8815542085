"""What ``specattn._cpu`` has of suffix decoding, in Python: the same drafts where it is not built.

Trees of continuations, the most probable first, from a text's own automaton and from suffix arrays
of others. csrc/cpu/suffix.h says what each number is for; probabilities are float32 here too, and
equal ones leave the queue in the same order, so that a text is drafted for alike. It takes fifty to
a hundred times as long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from specattn.decoding.drafting.heap import pop, push
from specattn.decoding.drafting.suffix_array import LONGEST, NO_MATCH, Corpus, Match, sort_suffixes
from specattn.decoding.drafting.suffix_automaton import ORDERED, ROOT, Automaton
from specattn.decoding.drafting.suffix_shares import Correction, Share

__all__ = ["Corpus", "PassTimes", "SuffixDrafter", "best_trees", "learn", "sort_suffixes"]

_F = np.float32
_PRIORS = 0.3, 0.45, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.9, 0.9  # by a match's length
_CLASSES = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64  # the longest of each class of lengths
_MOST_RANKS, _LEVELS, _NEGLIGIBLE, _FOLLOWED = 16, 6, _F(0.02), 2048


@dataclass
class _Candidate:
    """A token that may follow, the state that it leads to (below 0: looked for), its match."""

    token: int
    state: int
    length: int
    probability: Any


class _Node(NamedTuple):
    probability: Any
    parent: int
    token: int
    state: int
    length: int
    depth: int


class _Tree(NamedTuple):
    parents: list[int]
    tokens: list[int]
    probabilities: list[Any]


class PassTimes:
    """Seconds of a pass by its rows per request."""

    def __init__(self, rows: Sequence[int], seconds: Sequence[float]):
        ascending = all(a < b for a, b in zip(rows, rows[1:], strict=False))
        if not rows or rows[0] < 1 or len(seconds) != len(rows) or not ascending:
            raise ValueError("rows must ascend from 1 or more, with as many seconds")
        self.rows, self.seconds = list(rows), list(seconds)


class SuffixDrafter:
    """Trees of what followed a text's end before."""

    def __init__(self, corpora: Sequence[Corpus] | None = None):
        self.corpora = list(corpora or ())
        self._automaton, self._correction = Automaton(), Correction()
        self._known, self._corpora_known = (
            [Share(prior) for prior in _PRIORS for _ in range(2)] for _ in range(2)
        )
        self._ranks = [Share(0.3) for _ in range(_MOST_RANKS)]
        self.newest, self._recent, self._matches = -1, list[int](), list[Match]()

    def __len__(self) -> int:
        return self._automaton.states[self._automaton.last].length

    @property
    def match(self) -> int:
        """Tokens of the longest suffix that occurred before."""
        return self._automaton.states[self._automaton.match].length

    def extend(
        self,
        tokens: Sequence[int],
        successors: torch.Tensor | None = None,
        generated: bool = False,
    ) -> None:
        """Append tokens to the text; what was generated corrects probabilities."""
        for i, token in enumerate(tokens):
            if generated:
                for one in self._collect(self._end, self._matches, successors):
                    self._correction.add(one.probability, one.token == token)
            self._append(token, i + _FOLLOWED >= len(tokens), successors)

    @property
    def _end(self) -> _Node:
        return _Node(_F(1), -1, self.newest, self._automaton.match, self.match, 0)

    def _append(self, token: int, followed: bool, successors: torch.Tensor | None) -> None:
        levels = [
            (length, hit, self._known[_kind(length, edges == 1)])
            for length, edges, hit in self._automaton.extend(token)[:_LEVELS]
        ]
        for corpus, match in zip(self.corpora, self._matches, strict=False):
            if not match.length:
                continue
            hit = corpus.narrowed(match, token).length > 0
            share = self._corpora_known[_kind(match.length, corpus.single(match))]
            at = next((n for n, one in enumerate(levels) if one[0] < match.length), len(levels))
            levels.insert(at, (match.length, hit, share))
        for _, hit, share in levels:
            share.add(hit)
            if hit:
                break
        else:
            for share, ranked in zip(self._ranks, _after(successors, self.newest), strict=False):
                share.add(ranked == token)
                if ranked == token:
                    break
        self.newest = token
        if self.corpora:
            self._recent.append(token)
            if len(self._recent) > 1024:
                del self._recent[:-LONGEST]
            self._matches = self._followed(self._matches, self._recent) if followed else []

    def _followed(self, before: list[Match], context: Sequence[int]) -> list[Match]:
        """Return the matches of a context; `before` are those without its last token, if known."""
        matches = []
        for number, corpus in enumerate(self.corpora):
            earlier = before[number] if before else NO_MATCH
            match = corpus.narrowed(earlier, context[-1]) if earlier.length else NO_MATCH
            if not 0 < match.length <= LONGEST:
                match = corpus.longest(context, max(earlier.length, 1) if before else LONGEST)
            matches.append(match)
        return matches

    def _candidates(
        self, node: _Node, matches: list[Match], successors: torch.Tensor | None
    ) -> list[_Candidate]:
        """Return what may follow a node's context, each token once, with its state."""
        states, found = self._automaton.states, self._collect(node, matches, successors)
        for one in found:
            s = node.state
            while one.state < 0 and s >= ROOT:
                one.state = states[s].edges.get(one.token, -1)
                one.length = (node.length if s == node.state else states[s].length) + 1
                s = states[s].link
            if one.state < 0:
                one.state, one.length = ROOT, 0
        return found

    def _collect(
        self, node: _Node, matches: list[Match], successors: torch.Tensor | None
    ) -> list[_Candidate]:
        found, rest, states = dict[int, _Candidate](), _F(1), self._automaton.states
        waiting = sorted((-m.length, c) for c, m in enumerate(matches) if m.length)

        def add(token: int, state: int, length: int, probability: Any) -> None:
            one = found.setdefault(token, _Candidate(token, state, length, _F(0)))
            one.probability += probability
            if one.state < 0:
                one.state, one.length = state, length

        def add_longer(length: int, rest: Any) -> Any:
            while waiting and -waiting[0][0] > length:
                c = waiting.pop(0)[1]
                corpus, match = self.corpora[c], matches[c]
                if followers := corpus.following(match, ORDERED):
                    total = _F(sum(times for _, times in followers))
                    share = self._corpora_known[_kind(match.length, corpus.single(match))]
                    mass = rest * share.value
                    for token, times in followers:
                        add(token, -1, 0, mass * _F(times) / total)
                    rest -= mass
            return rest

        s, length = node.state, node.length
        for _ in range(_LEVELS):
            if s <= ROOT:
                break
            rest, edges = add_longer(length, rest), states[s].edges
            if edges:
                taken = [*islice(reversed(edges.items()), ORDERED)]
                total = _F(sum(states[target].count for _, target in taken))
                mass = rest * self._known[_kind(length, len(edges) == 1)].value
                for token, target in taken:
                    add(token, target, length + 1, mass * _F(states[target].count) / total)
                rest -= mass
            if rest < _NEGLIGIBLE:
                return [*found.values()]
            s = states[s].link
            length = states[s].length if s >= 0 else length
        if (rest := add_longer(0, rest)) < _NEGLIGIBLE:
            return [*found.values()]
        for share, ranked in zip(self._ranks, _after(successors, node.token), strict=False):
            mass = rest * share.value
            target = states[ROOT].edges.get(ranked, -1)  # met before, if at all, elsewhere
            add(ranked, max(target, ROOT), int(target >= 0), mass)
            rest -= mass
        return [*found.values()]

    def draft(
        self,
        nodes: int,
        depth: int,
        least: float | None = None,
        successors: torch.Tensor | None = None,
    ) -> tuple[list[int], list[int], list[float]]:
        """Return parents (-1: the text's end), tokens and path probabilities, the best first."""
        parents, tokens, found = self._draft(nodes, depth, _F(least or 0), successors)
        return parents, tokens, [*map(float, found)]

    def _draft(
        self,
        nodes: int,
        depth: int,
        least: Any,
        successors: torch.Tensor | None,
        goes_on: Callable[[_Tree, Any], bool] | None = None,
    ) -> _Tree:
        tree, waiting = _Tree([], [], []), list[_Node]()
        matches = list[list[Match]]()  # of the tree's nodes; leaves have none

        def expand(node: _Node, number: int) -> None:
            own = self._matches
            if number >= 0 and self.corpora:
                matches.extend([] for _ in range(number + 1 - len(matches)))
                context, above = [node.token], node.parent
                while above >= 0:
                    context.append(tree.tokens[above])
                    above = tree.parents[above]
                context = [*context, *reversed(self._recent)][:LONGEST][::-1]
                before = self._matches if node.parent < 0 else matches[node.parent]
                own = matches[number] = self._followed(before, context)
            for one in self._candidates(node, own, successors):
                chance = node.probability * self._correction.corrected(one.probability)
                if chance >= least:
                    below = (one.token, one.state, one.length, node.depth + 1)
                    push(waiting, _Node(chance, number, *below))

        if nodes < 1 or depth < 1:
            return tree
        expand(self._end, -1)
        while waiting and len(tree.tokens) < nodes:
            if goes_on is not None and not goes_on(tree, waiting[0].probability):
                break
            node, number = pop(waiting), len(tree.tokens)
            tree.parents.append(node.parent)
            tree.tokens.append(node.token)
            tree.probabilities.append(node.probability)
            if node.depth < depth:
                expand(node, number)
        return tree


def best_trees(
    drafters: Sequence[SuffixDrafter],
    depths: Sequence[int],
    times: PassTimes,
    drafted: torch.Tensor,
    successors: torch.Tensor | None,
) -> tuple[int, tuple[tuple[int, ...], ...], tuple[float, ...]]:
    """Return of trees those with which drafters gain the most tokens per second.

    Rows of a pass, of several sizes one, parents with the roots and padding, tokens that each is
    expected to gain; roots and nodes are written into `drafted`, row after row.
    """
    sizes = [rows - 1 for rows in times.rows]
    pays = _Pays(sizes, times.seconds).goes_on if len(drafters) == 1 else None
    zero = _F(0)
    trees = [
        one._draft(sizes[-1], depth, zero, successors, pays)
        for one, depth in zip(drafters, depths, strict=True)
    ]
    longest, chosen, fastest = max(len(tree.tokens) for tree in trees), 0, 0.0
    for i, size in enumerate(sizes):
        if i and sizes[i - 1] >= longest:
            break
        gained = sum(1 + _sum(tree.probabilities[:size]) for tree in trees)
        if gained / times.seconds[i] > fastest:
            fastest, chosen = gained / times.seconds[i], i
    cut = [_Tree(*(part[: sizes[chosen]] for part in tree)) for tree in trees]
    rows = 1 + max(len(tree.tokens) for tree in cut)
    if len(sizes) > 1:
        rows = next(size for size in times.rows if size >= rows)
    written = drafted.numpy()[: rows * len(cut)].reshape(len(cut), rows)
    written[:] = 0
    for row, drafter, tree in zip(written, drafters, cut, strict=True):
        row[0], row[1 : 1 + len(tree.tokens)] = drafter.newest, tree.tokens
    shapes = tuple(
        (-1, *(parent + 1 for parent in tree.parents), *[-1] * (rows - 1 - len(tree.tokens)))
        for tree in cut
    )
    return rows, shapes, tuple(_sum(tree.probabilities) for tree in cut)


class _Pays:
    """Whether a larger tree of a single request may be better than the best so far."""

    def __init__(self, sizes: list[int], seconds: list[float]):
        self.sizes, self.seconds = sizes, seconds
        self.best = self.sum = 0.0
        self.next = self.added = 0

    def goes_on(self, tree: _Tree, probability: Any) -> bool:
        for one in tree.probabilities[self.added :]:
            self.sum += float(one)
        self.added = len(tree.probabilities)
        if self.sizes[self.next] != self.added:
            return True
        self.best = max(self.best, (1 + self.sum) / self.seconds[self.next])
        self.next += 1
        return any(
            (1 + self.sum + float(probability) * (size - self.added)) / seconds > self.best
            for size, seconds in zip(
                self.sizes[self.next :], self.seconds[self.next :], strict=True
            )
        )


def learn(
    drafters: Sequence[SuffixDrafter],
    texts: torch.Tensor,
    rows: Sequence[int],
    begins: Sequence[int],
    ends: Sequence[int],
    successors: torch.Tensor | None,
    logits: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    nodes: torch.Tensor | None = None,
) -> None:
    """Append what was generated; then note what was ranked best behind root and accepted nodes."""
    for drafter, row in zip(drafters, rows, strict=True):
        new = texts[row, begins[row] + len(drafter) : ends[row]]
        drafter.extend(new.tolist(), successors, True)
    if logits is None or tokens is None or nodes is None or successors is None:
        return
    for own, drafted, path in zip(logits, tokens.tolist(), nodes.tolist(), strict=True):
        for node in (0, *path):
            if node < 0:
                break
            successors[drafted[node]] = _largest(own[node].float(), successors.shape[1])


def _largest(row: torch.Tensor, k: int) -> torch.Tensor:
    """Return the places of the k largest entries, of equals the first; NaN is none."""
    values = row.numpy()
    known = np.flatnonzero(~np.isnan(values))
    if len(known) > k:
        kth = np.partition(values[known], len(known) - k)[len(known) - k]
        known = known[values[known] >= kth]
    known = known[np.argsort(-values[known], kind="stable")][:k]
    found = np.full(k, -1, dtype=np.int32)
    found[: len(known)] = known
    return torch.from_numpy(found)


def _kind(length: int, single: bool) -> int:
    return 2 * bisect_left(_CLASSES, max(length, 1)) + single


def _after(successors: torch.Tensor | None, token: int) -> list[int]:
    """Return the tokens that the model ranked best after one, as far as they are known."""
    if successors is None or not 0 <= token < len(successors):
        return []
    ranked = successors[token, :_MOST_RANKS].tolist()
    return ranked[: ranked.index(-1)] if -1 in ranked else ranked


def _sum(probabilities: Sequence[Any]) -> float:
    total = 0.0
    for one in probabilities:
        total += float(one)
    return total

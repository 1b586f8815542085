"""Suffix decoding: draft a tree of what followed the text's end where it occurred before.

A suffix automaton over prompt and output finds all earlier occurrences of the longest matching
ends, as the text grows. What has no match is drafted from Token Recycling's table. (Oliaro et al.,
*SuffixDecoding*, arXiv 2411.04975; Luo et al., *Turning Trash into Treasure*, arXiv 2408.08696.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from specattn.acceptance import Accepted
from specattn.decoding.drafting.corpus import corpora_of, suffix_index
from specattn.decoding.drafting.gains import SIZES, Lookups
from specattn.decoding.drafting.pacer import Pacer
from specattn.decoding.drafting.trie import followed, shared_tree
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.decoding.engine.method import Method
from specattn.decoding.passes.runner import Verification
from specattn.decoding.text.draws import downloaded
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
    """

    nodes: int | None = None
    depth: int = 32
    recycling: bool = True
    k: int = 8
    corpus: tuple[Path, ...] = ()
    remember: bool = False
    cache: Path | None = None

    def __post_init__(self) -> None:
        self._require(1, "nodes", "depth", "k")
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
        return SuffixDrafter(self, context, suffix_index())


class Lookup(NamedTuple):
    """What a round would draft, before it is known that it shall.

    A pass of `rows` rows per request, the root's included, with trees of `shapes`, the parents of
    their nodes; `drafted`, int64 [B, rows] on the host, are roots and nodes' tokens until the next
    lookup. Of each request's nodes `expected` are expected to be accepted.
    """

    rows: int
    shapes: tuple[tuple[int, ...], ...]
    drafted: torch.Tensor
    expected: tuple[float, ...]


class SuffixDrafter(Drafter):
    """Drafts from the text's own repetitions, by `native`: `specattn._cpu`, or what has its names.

    Between `find` and `draft` another drafter may turn out to be faster; its round is followed.
    `pacer` says what passes take, None where a number of nodes is given.
    """

    def __init__(self, method: Suffix, context: DraftContext, native: Any):
        self.native = native
        self.method, self.sequences, target = method, context.sequences, context.target
        self.model, self.on_cpu = target.model, target.device.type == "cpu"
        self.successors: torch.Tensor | None = None
        if method.recycling:
            size = target.model.config.vocab_size, min(method.k, target.model.config.vocab_size)
            self.successors = torch.full(size, -1, dtype=torch.int32, device="cpu")

        corpora = method.corpora(target.model)
        self.running = list(context.sequences.active)
        self.indexes = [native.SuffixDrafter(corpora) for _ in self.running]
        for row, index in zip(self.running, self.indexes, strict=True):
            index.extend(context.sequences.text(row).tolist(), self.successors)
        self.times, self.pacer = native.PassTimes([method.max_nodes], [1.0]), None
        self.known: dict[int, float] = {}  # of which `times` are
        if method.nodes is None:
            self.pacer = Pacer(context, most_looked_up=method.max_nodes)
        self.ranked: torch.Tensor | None = None  # by a GPU, on its way to the host
        self.alone = True  # or else whether it drafts is not its own choice
        self.asked = False  # whether this round has looked up
        self.looked_up: Lookup | None = None
        self.room = torch.empty(
            len(self.running) * method.max_nodes,
            dtype=torch.int64, device="cpu", pin_memory=target.device.type != "cpu",
        )  # fmt: skip
        self.drafted: dict[int, torch.Tensor] = {}  # the part of `room` for so many rows
        self.promised = self.accepted = self.expected = 0.0
        self.root_alone = Tree.chain(0, device=target.device)

    def look_up(self) -> Lookup | None:
        """Return what is worth drafting now, None in a round that rests."""
        if self.pacer is None:
            return self.find()
        before, self.asked = self.asked, not self.pacer.resting
        if not self.asked:
            return None
        if not before:
            self.catch_up()
        self.looked_up = self.find()
        return self.looked_up

    def promised_by(self, lookup: Lookup | None) -> list[float]:
        """Return how many tokens each request should get by what was found, none without."""
        if lookup is None or self.pacer is None:
            return []
        return [1 + self.pacer.lookups.factor * one for one in lookup.expected]

    def find(self) -> Lookup:
        """Return what is worth drafting now, looked up in any case."""
        most, sequences = self.method.depth, self.sequences
        depths = [min(most, sequences.drafts(row)) for row in sequences.active]
        if self.pacer is not None and (known := self.pacer.of_lookups()) is not self.known:
            self.known = known
            self.times = self.native.PassTimes(list(known), list(known.values()))
        rows, shapes, expected = self.native.best_trees(
            self.indexes, depths, self.times, self.room, self.successors
        )
        if (drafted := self.drafted.get(rows)) is None:
            count = len(shapes)
            drafted = self.drafted[rows] = self.room[: count * rows].view(count, rows)
        return Lookup(rows, shapes, drafted, expected)

    def draft(self, root: torch.Tensor, lookup: Lookup) -> Draft:
        """Return what was found as a draft behind `root` [B]."""
        self.expected = sum(lookup.expected)
        if lookup.rows == 1:
            return self.nothing(root)
        tokens = lookup.drafted.to(root.device, non_blocking=True)
        return Draft(shared_tree(lookup.shapes, root.device), tokens)

    def nothing(self, root: torch.Tensor) -> Draft:
        """Return `root` [B] alone as a draft."""
        return Draft(self.root_alone, root[:, None])

    def propose(self, root: torch.Tensor) -> Draft:
        """Draft behind `root` [B]."""
        if self.pacer is not None:
            self.pacer.prepare(root)
        lookup = self.look_up()
        if self.pacer is None or lookup is None:
            draft = self.nothing(root) if lookup is None else self.draft(root, lookup)
        else:
            promised = self.promised_by(lookup)
            choice = self.pacer.choose(self.sequences.draft_depth, lookup.rows, promised)
            draft = self.draft(root, lookup) if choice.rows > 1 else self.nothing(root)
        if self.pacer is not None:
            self.pacer.begin(draft.tree.size)
        return draft

    def on_accepted(self, draft: Draft, accepted: Accepted, result: Verification) -> None:
        """Let a GPU rank what comes after the root and every accepted token."""
        if self.on_cpu or self.successors is None or not self.learns:
            return
        path = torch.nn.functional.pad(accepted.nodes, (1, 0)).clamp_min(0)  # ends with roots
        wide = path[..., None].expand(-1, -1, result.logits.shape[2])
        best = result.logits.gather(1, wide).topk(self.successors.shape[1]).indices
        tokens = draft.tokens.gather(1, path)
        self.ranked = downloaded(torch.cat([tokens[..., None], best], 2))

    @property
    def learns(self) -> bool:
        """Whether the round tells something: else the text is read before the next lookup."""
        return self.pacer is None or self.asked

    def observe(self, verified: Verified) -> None:
        """Learn what the target ranked best, and of an own draft how much was accepted."""
        if self.learns:
            self._learn(verified)
        if self.pacer is not None and self.alone:
            self.pacer.end(verified)

    def _learn(self, verified: Verified) -> None:
        if verified.own and verified.draft.tree.size > 1:
            self.promised += self.expected
            self.accepted += sum(verified.counts)
        if self.pacer is not None:
            self._judge(self.pacer.lookups)
        self._read(verified)

    def _judge(self, lookups: Lookups) -> None:
        """Learn how true the lookup was by what requests went on with, whoever drafted it."""
        lookup, rows = self.looked_up, self.sequences.active
        if lookup is None or lookup.rows == 1:
            return
        given = zip(rows, lookup.shapes, lookup.drafted.tolist(), lookup.expected, strict=True)
        for row, shape, tokens, expected in given:
            came = self.sequences.emitted[row]
            true = followed(shape, tokens, came)
            if true == len(came):  # what it has beyond them is not known to be wrong
                expected = min(expected, true)
            lookups.learn(expected, true)

    def _read(self, verified: Verified) -> None:
        """Read what was generated, and keep what the target ranked best."""
        logits, tokens = verified.result.logits, verified.draft.tokens
        if self.successors is None:
            self.catch_up()
        elif self.ranked is not None:
            self.catch_up()  # before the table knows what came
            self._recycle(self.ranked, verified.counts)
            self.ranked = None
        else:
            logits = logits.float() if logits.dtype == torch.float64 else logits
            self.catch_up(logits, tokens, verified.accepted.nodes)

    def catch_up(self, *ranked: torch.Tensor) -> None:
        """Read what was generated; then keep what the target ranked best after it, if given."""
        texts = self.sequences
        self.native.learn(
            self.indexes, texts.host_rows, texts.active, texts.padding, texts.ends,
            self.successors, *ranked,
        )  # fmt: skip

    def compact(self, rows: list[int]) -> None:
        """Drop the texts of finished requests, or remember what they have been given."""
        self.indexes = [self.indexes[row] for row in rows]
        self.drafted.clear()
        active, self.running = self.running, list(self.sequences.active)
        if not self.method.remember:
            return
        known = corpora_of(self.model)
        for row in set(active) - set(self.running):
            known.outputs.add(self.sequences.new_tokens(row))
        if self.method.cache is not None and not self.running:
            known.keep(self.method.cache)

    def _recycle(self, ranked: torch.Tensor, counts: Sequence[int]) -> None:
        """Keep each token's best successors, [B, rows, 1 + k] behind it: of the first rows."""
        assert self.successors is not None
        for own, count in zip(ranked.numpy(), counts, strict=True):
            stays = own[: count + 1]
            # numpy's assignment keeps the last of a token's rows.
            self.successors.numpy()[stays[:, 0]] = stays[:, 1:]

    def details(self) -> dict[str, Any]:
        """Return what passes were found to cost, and how true the expectations were."""
        if self.pacer is None:
            return {}
        true = round(self.accepted / self.promised, 3) if self.promised else None
        return {**self.pacer.details(), "accepted per expected": true}

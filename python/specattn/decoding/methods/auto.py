"""Whatever is fastest: nothing, the text's own repetitions, self-drafting or a trained drafter.

Every round is drafted by what promises the most tokens per second now. What the text itself offers
is known before the round (`Suffix`), and so is what a pass of so many rows takes (`PassCosts`).
Drafters that must run a model to know are judged by what their rounds took and gave (`Chooser`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from specattn.decoding.drafting.asking import Asking
from specattn.decoding.drafting.choosing import Account, Chooser, Worth
from specattn.decoding.drafting.costs import alike
from specattn.decoding.drafting.trie import shared_tree
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.decoding.engine.method import Method
from specattn.decoding.methods.longspec import LongSpec
from specattn.decoding.methods.medusa import Medusa
from specattn.decoding.methods.poss import PosS
from specattn.decoding.methods.suffix import Lookup, Suffix, SuffixDrafter
from specattn.decoding.methods.vegas import Vegas, VegasDrafter
from specattn.decoding.model.model import Model
from specattn.decoding.passes.attention import NO_CAPTURE

TRAINED: tuple[type[Method], ...] = (LongSpec, PosS, Medusa)
"""Methods whose drafter is looked for in the folder of a model, in this order."""

_AT_PAR = 2.0, 2.0  # passes of one row and tokens: a trained drafter, before it has been seen

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Auto(Method, name="auto"):
    """Drafting by whatever is fastest, round by round; not at all where nothing pays.

    It chooses by the clock, and its texts do not depend on it: greedy ones are the target's own,
    and a seed decides the others (docs/sampling.md). In a batch each request is drafted for by what
    suits it, in one pass.

    Parameters
    ----------
    vegas : bool
        Whether the target may draft for itself.
    trained : Method, str or None
        A method with a trained drafter, or the name of one whose drafter lies in the model's
        folder. "found": the first of `TRAINED` for which there is one, if any. None: without.
    corpus, remember, cache
        As for `Suffix`.

    Raises
    ------
    ValueError
        `trained` is no such method. From `prepared`, and so when a run starts: its drafter does not
        exist, or does not fit the model. As for `Suffix` besides.
    """

    reads_features = True

    vegas: bool = True
    trained: Method | Literal["found", "longspec", "poss", "medusa"] | None = "found"
    corpus: tuple[Path, ...] = ()
    remember: bool = False
    cache: Path | None = None

    def __post_init__(self) -> None:
        known = {kind.name: kind for kind in TRAINED}
        if isinstance(self.trained, str) and self.trained in known:
            object.__setattr__(self, "trained", known[self.trained]())
        elif not (self.trained in ("found", None) or isinstance(self.trained, TRAINED)):
            expected = ", ".join(["found", *known])
            raise ValueError(f"trained must be one of {expected} or None, got {self.trained!r}")
        _ = self.lookup  # which checks its options

    @property
    def max_nodes(self) -> int:
        """The largest tree that it may come to use."""
        trained = [kind() for kind in TRAINED] if self.trained == "found" else [self.trained]
        methods = [Suffix(), Vegas(), *trained]
        return max(one.max_nodes for one in methods if isinstance(one, Method))

    @property
    def lookup(self) -> Suffix:
        """The method that drafts from texts."""
        return Suffix(corpus=self.corpus, remember=self.remember, cache=self.cache)

    def prepared(self, model: PreTrainedModel) -> Auto:
        """Return this method with its texts read and the drafter for `model` loaded, if any."""
        self.lookup.prepared(model)
        if isinstance(self.trained, Method):
            return replace(self, trained=self.trained.prepared(model))
        if self.trained is None:
            return self
        found = Model.of(model).recall("drafter beside it", lambda: _beside(model))
        return replace(self, trained=found)

    def clipped(self, depth: int) -> Auto:
        """Return this method with no deeper drafts of a trained drafter than `depth`."""
        if isinstance(self.trained, Method):
            return replace(self, trained=self.trained.clipped(depth))
        return self

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter that has read the prompts."""
        drafters = dict[str, Drafter]()
        if self.vegas and context.target.full_layers:
            drafters[Vegas.name] = VegasDrafter(Vegas(), context, self.max_nodes - 1)
        if isinstance(self.trained, Method):
            drafters[self.trained.name] = self.trained.start(context)
        return _AutoDrafter(context, self.lookup, drafters)


def _beside(model: PreTrainedModel) -> Method | None:
    """Return the method whose trained drafter lies in the model's folder, loaded."""
    folder = Path(model.config._name_or_path)
    for kind in [one for one in TRAINED if (folder / one.name).is_dir()][:1]:
        try:
            return kind().prepared(model)
        except (OSError, ValueError) as error:
            _log.warning("auto: %s: the drafter is not used: %s", folder / kind.name, error)
    return None


class _NoIndex:
    """Finds nothing: in place of `specattn._cpu`."""

    def SuffixDrafter(self, corpora: list[Any]) -> _NoIndex:
        return self

    def PassTimes(self, rows: list[int], seconds: list[float]) -> None:
        pass

    def extend(self, tokens: list[int], successors: torch.Tensor | None) -> None:
        pass

    def learn(self, *_: Any) -> None:
        pass

    def best_trees(self, drafters: list[Any], *_: Any) -> tuple[int, tuple, tuple]:
        return 1, ((-1,),) * len(drafters), (0.0,) * len(drafters)


def _lookup(method: Suffix, context: DraftContext) -> SuffixDrafter:
    """Return what looks up repetitions, or says once that it cannot."""
    try:
        return method.start(context)
    except RuntimeError as error:
        _say_once(str(error))
        return SuffixDrafter(Suffix(recycling=False), context, _NoIndex())


@cache
def _say_once(reason: str) -> None:
    _log.warning("auto drafts nothing from the text: %s", reason)


@dataclass
class _Experience:
    """What runs of this process found for a model, by drafter, batch and length."""

    account: Account = field(default_factory=Account)
    worths: dict[Any, Worth] = field(default_factory=dict)


class _AutoDrafter(Drafter):
    def __init__(self, context: DraftContext, lookup: Suffix, drafters: dict[str, Drafter]):
        self.target, self.sequences = context.target, context.sequences
        self.drafters = drafters
        self.suffix = _lookup(lookup, context)
        self.vegas = next((one for one in drafters.values() if isinstance(one, VegasDrafter)), None)
        self.experience = Model.of(self.target.model).recall(("pace", "auto"), _Experience)
        account = self.experience.account
        self.chooser = Chooser(self.target.clock(), self._known_worths(), account)
        self.asking = Asking(self.target.clock())
        self.name: str | None = None  # whose round it is
        self.own: list[bool] = []  # the requests that it drafts for

    def on_prefill(self, start: int, features: Sequence[torch.Tensor]) -> None:
        for drafter in self.drafters.values():
            drafter.on_prefill(start, features)

    def propose(self, root: torch.Tensor) -> Draft:
        # Where scores were captured, a drafter gets ready.
        waits = self.chooser.fastest is None and self.capture is NO_CAPTURE
        if waits and self.asking.skips():
            return self._draft_nothing(root)
        self.asking.begin()
        if self.asking.left_out:
            self.suffix.catch_up()
        lookup = self.suffix.find()
        self.asking.found(lookup.saved)
        row_seconds = self.suffix.costs.measured.get(1)
        chosen = self.chooser.choose(lookup.tokens, lookup.seconds, row_seconds)
        self.capture = NO_CAPTURE
        ready = self.vegas is None or chosen != Vegas.name or self.vegas.selected is not None
        self.name, self.own = chosen if ready else None, [True] * len(root)
        self.asking.end("asked")
        if self.name is None:
            self.chooser.begin(None)
            draft = self.suffix.draft(root, lookup)
            draft = draft._replace(drafters=[Suffix.name] * len(root))
        else:
            self.chooser.begin(self.name)
            draft = self._draft(self.name, root, lookup)
            names = [self.name if own else Suffix.name for own in self.own]
            draft = draft._replace(drafters=names)
        if self.vegas is not None and self.chooser.keeps(Vegas.name, row_seconds):
            self.capture = self.vegas.captured(draft.tree.size)
        return draft

    def _draft_nothing(self, root: torch.Tensor) -> Draft:
        """Return the root alone: where the text offers nothing, asking it costs the most."""
        self.name, self.own = None, [True] * len(root)
        self.chooser.begin(None)
        return self.suffix.nothing(root)._replace(drafters=[Suffix.name] * len(root))

    def _draft(self, name: str, root: torch.Tensor, lookup: Lookup) -> Draft:
        """Draft by running a model, but for requests to which what was looked up promises more."""
        draft, worth = self.drafters[name].propose(root), self.chooser.worths[name]
        if draft.tree.size == 1:
            self.chooser.drafts_nothing()
        if worth.known:
            own = [worth.tokens >= tokens for tokens in lookup.tokens]
            self.own = own if any(own) else self.own
        return draft if all(self.own) else _mixed(draft, self.own, lookup)

    def observe(self, verified: Verified) -> None:
        if asked := self.name is None and not self.asking.left_out:
            self.asking.begin()
        emitted = [1.0 + count for count in verified.counts]
        drafted = [tokens for tokens, is_own in zip(emitted, self.own, strict=True) if is_own]
        for name, drafter in self.drafters.items():
            own = name == self.name and all(self.own)
            drafter.observe(verified._replace(own=own))
        if self.name is not None or asked:  # else the text is read before the next lookup
            self.suffix.observe(verified._replace(own=asked))
        self.chooser.end(sum(emitted), sum(drafted) / len(drafted))
        self.asking.end("learned")

    def compact(self, rows: list[int]) -> None:
        self.suffix.compact(rows)
        for drafter in self.drafters.values():
            drafter.compact(rows)
        if rows:
            self.chooser.worths = self._known_worths()

    def _known_worths(self) -> dict[str, Worth]:
        """Return what is known of each drafter for such a batch, from earlier runs too."""
        known = self.experience.worths
        kind = alike(self.target, self.sequences)
        guesses = dict.fromkeys(self.drafters, _AT_PAR)
        if self.vegas is not None:
            guesses[Vegas.name] = self.vegas.guess()
        return {
            name: known.setdefault((name, *kind), Worth(*guess)) for name, guess in guesses.items()
        }

    def details(self) -> dict[str, Any]:
        """Return what trials have cost, and what passes cost."""
        return {"seconds lost to trials": round(self.chooser.lost, 4), **self.suffix.details()}


def _mixed(draft: Draft, own: list[bool], lookup: Lookup) -> Draft:
    """Return a draft in which requests that are not `own` draft what was looked up instead."""
    size, parents = draft.tree.size, draft.tree.parent_lists
    shapes, tokens = list[tuple[int, ...]](), draft.tokens.clone()
    for request, (is_own, found) in enumerate(zip(own, lookup.shapes, strict=True)):
        shape: Sequence[int] = parents[request % len(parents)]
        if not is_own:
            shape = found[:size]
            tokens[request, : len(shape)] = lookup.drafted[request, : len(shape)]
        shapes.append((*shape, *[-1] * (size - len(shape))))
    return Draft(shared_tree(tuple(shapes), tokens.device), tokens)

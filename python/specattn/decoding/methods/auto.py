"""Auto: drafts by whatever is fastest now: lookup, self-drafting, a trained drafter, or nothing.

Every round is drafted by what promises the most tokens per second now. What the text itself offers
is known before the round (`Suffix`), and so is what a pass of so many rows takes. Drafters that
must run a model to know have shares in the same `Pacer`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import PreTrainedModel

from specattn.acceptance import Accepted
from specattn.decoding.drafting.pace import PacedDrafter, Share
from specattn.decoding.drafting.pacer import Pacer
from specattn.decoding.drafting.trained import Trained
from specattn.decoding.drafting.trie import shared_tree
from specattn.decoding.engine.contract import Draft, DraftContext, Drafter, Verified
from specattn.decoding.engine.method import Method
from specattn.decoding.methods.cast import Cast
from specattn.decoding.methods.dflash import DFlash
from specattn.decoding.methods.eagle3 import Eagle3
from specattn.decoding.methods.longspec import LongSpec
from specattn.decoding.methods.medusa import Medusa
from specattn.decoding.methods.mtp import Mtp
from specattn.decoding.methods.poss import PosS
from specattn.decoding.methods.suffix import Lookup, Suffix
from specattn.decoding.methods.vegas import Vegas, VegasDrafter
from specattn.decoding.model.checkpoint import folder_of
from specattn.decoding.model.model import Model
from specattn.decoding.model.quantised import is_rounded
from specattn.decoding.passes.attention import NO_CAPTURE
from specattn.decoding.passes.runner import Verification
from specattn.peak_memory import available_bytes

TRAINED: tuple[type[Trained], ...] = (PosS, Eagle3, LongSpec, DFlash, Mtp, Medusa)
"""Methods whose drafter is looked for in the folder of a model, in this order."""

_PAYS = 256  # tokens that a run must be about to make before weights are rounded for it
_ROUNDED_BYTES = 0.55  # of a weight in 4 bits, and its share of a scale
_WITH_ROUNDED = 1024  # tokens that Vegas' drafts read at least, with rounded weights
_READ_FASTER = ("cpu",)  # devices that were measured to multiply 4 bits faster than 16

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
        Whether the target may draft for itself, attending to few cached tokens.
    cast : bool
        Whether it drafts with its weights rounded to 4 bits, on all cached tokens and, on a CPU, on
        few, where these can be made: of weights of more bits (`Cast`). The first run of 256 new
        tokens or more makes them, on one rank, unless they took more than a quarter of the memory
        that is left. On a GPU drafts on few cached tokens keep the target's own weights.
    trained : Method, str or None
        A method with a trained drafter, or the name of one whose drafter lies in the model's
        folder. "found": the first of `TRAINED` for which there is one that fits, if any. None:
        without.
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
    cast: bool = True
    trained: (
        Method | Literal["found", "poss", "eagle3", "longspec", "dflash", "mtp", "medusa"] | None
    ) = "found"
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
        methods = [Suffix(), Vegas(), Cast(), *trained]
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
        key = "drafter beside it", model.dtype, model.device  # which model.to() changes
        found = Model.of(model).recall(key, lambda: _beside(model))
        return replace(self, trained=found)

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return what its trained drafter reads."""
        if isinstance(self.trained, Method):
            return self.trained.feature_layers(model)
        return super().feature_layers(model)

    def clipped(self, depth: int) -> Auto:
        """Return this method with no deeper drafts of a trained drafter than `depth`."""
        if isinstance(self.trained, Method):
            return replace(self, trained=self.trained.clipped(depth))
        return self

    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter that has read the prompts."""
        drafters = dict[str, Drafter]()
        vegas = Vegas()
        if self.cast and _rounds(context):
            drafters[Cast.name] = Cast().start(context)
            if context.target.model.device.type in _READ_FASTER:
                # Beside rounded weights more of the cache is worth its reading.
                vegas = Vegas(weights=Cast.weights, min_tokens=_WITH_ROUNDED)
        if self.vegas and context.target.full_layers:
            drafters[Vegas.name] = VegasDrafter(vegas, context, self.max_nodes - 1)
        if isinstance(self.trained, Method):
            drafters[self.trained.name] = self.trained.start(context)
        return _AutoDrafter(context, self.lookup, drafters)


def _rounds(context: DraftContext) -> bool:
    """Whether a run may draft with rounded weights; they are made here if need be, and if it pays.

    To round takes what some fifty passes take, and drafts with it gain a fifth or so.
    """
    model = context.target.model
    if not is_rounded(model, Cast.weights):
        free, needed = available_bytes(model.device), _ROUNDED_BYTES * model.num_parameters()
        if context.target.lockstep is not None:  # ranks would have to agree on what is free
            return False
        if context.sequences.draft_depth < _PAYS or (free is not None and 4 * needed > free):
            return False
    try:
        context.target.rounded(Cast.weights)
    except ValueError as error:
        _log.debug("auto drafts with the target's own weights alone: %s", error)
        return False
    return True


def _beside(model: PreTrainedModel) -> Method | None:
    """Return the first method whose trained drafter lies in the model's folder and fits, loaded."""
    folder, depth = folder_of(model), model.config.num_hidden_layers
    for kind in TRAINED:
        try:
            where = kind.offered(folder, depth)
            if where is not None:
                return kind().prepared(model)
        except (OSError, ValueError) as error:
            _log.warning("auto: %s: the drafter of %s is not used: %s", folder, kind.name, error)
    return None


class _AutoDrafter(Drafter):
    def __init__(self, context: DraftContext, lookup: Suffix, drafters: dict[str, Drafter]):
        self.target, self.sequences = context.target, context.sequences
        self.drafters = cast(dict[str, PacedDrafter], drafters)
        self.suffix = lookup.start(context)
        self.vegas = next((one for one in drafters.values() if isinstance(one, VegasDrafter)), None)
        self.shares = dict[str, Share]()
        for name, drafter in self.drafters.items():
            self.shares[name] = drafter.arm = drafter.arm.among(context, name, drafter)
        self.pacer = self.suffix.pacer = Pacer(context, [*self.shares.values()], lookup.max_nodes)
        for name, share in self.shares.items():
            share.join(self.pacer, name)
        self.suffix.alone = False
        self.name: str | None = None  # whose round it is
        self.own: list[bool] = []  # the requests that it drafts for

    def on_prefill(self, start: int, features: Sequence[torch.Tensor]) -> None:
        for drafter in self.drafters.values():
            drafter.on_prefill(start, features)

    def propose(self, root: torch.Tensor) -> Draft:
        pacer, depth = self.pacer, self.sequences.draft_depth
        pacer.prepare(root)
        lookup = self.suffix.look_up()
        promised = self.suffix.promised_by(lookup)
        choice = pacer.choose(depth, lookup.rows if lookup else 1, promised)
        name = self.name = choice.name
        prepares = name == Vegas.name and self.vegas is not None and self.vegas.selected is None
        if name is not None and not prepares:
            self.shares[name].planned = choice.rows
            draft = self.drafters[name].draft(root, choice.effort)
            pacer.begin(draft.tree.size, self.shares[name], choice.effort)
            # Requests to which what was looked up promises more draft that.
            self.own = [choice.alone >= one for one in promised]
            if not any(self.own):
                self.own = [True] * len(root)
            if lookup is not None and not all(self.own):
                draft = _mixed(draft, self.own, lookup)
        else:
            self.name, self.own = None, [True] * len(root)
            # Of passes that rank no such size is captured; of others nothing may pay.
            if pacer.captures if prepares else choice.rows == 1:
                lookup = None
            draft = self.suffix.nothing(root) if lookup is None else self.suffix.draft(root, lookup)
            if not prepares:
                pacer.begin(draft.tree.size)
        self.capture = NO_CAPTURE
        if name == Vegas.name and self.vegas is not None:
            self.capture = self.vegas.captured(draft.tree.size)
        drafters = [self.name if own and self.name else Suffix.name for own in self.own]
        return draft._replace(drafters=drafters)

    def on_accepted(self, draft: Draft, accepted: Accepted, result: Verification) -> None:
        self.suffix.on_accepted(draft, accepted, result)

    def observe(self, verified: Verified) -> None:
        others, whose = verified._replace(own=False), self.name if all(self.own) else ""
        for name, drafter in self.drafters.items():
            drafter.observe(verified if name == whose else others)
        self.suffix.observe(verified if self.name is None else others)
        self.pacer.end(verified, self.own)  # what drafters learn is part of what a round takes

    def compact(self, rows: list[int]) -> None:
        self.suffix.compact(rows)
        for drafter in self.drafters.values():
            drafter.compact(rows)

    def details(self) -> dict[str, Any]:
        """Return what rounds cost."""
        return self.suffix.details()


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

"""`Method`: the description of a decoding method, and its door into ``model.generate``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import Parameter, signature
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from specattn.decoding.engine.contract import DraftContext, Drafter
from specattn.decoding.engine.kept_back import Signature, given_to_generate
from specattn.decoding.engine.loop import CHUNK_SIZE, OnPrefill, OnRound, decode
from specattn.decoding.engine.obeyed import (
    check_positions,
    checked_function,
    checked_streamer,
    left_padding,
    pad_token,
    refuse_unsupported,
)
from specattn.decoding.engine.target import Target
from specattn.decoding.model.text_model import text_model
from specattn.decoding.passes.attention import HEAD
from specattn.decoding.passes.replay import Compile
from specattn.decoding.ranks.lockstep import Lockstep
from specattn.decoding.text.numbers import checked_numbers
from specattn.decoding.text.rounds import Round
from specattn.decoding.text.sampling import Sampler
from specattn.decoding.text.sequences import Sequences
from specattn.decoding.text.statistics import Statistics
from specattn.distributed.group import ContextParallel
from specattn.ops.gated_delta_tree import MOST_ROWS

OnTokens = Callable[[int, list[int]], None]


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What ``model.generate(..., return_dict_in_generate=True)`` returns, with `statistics`."""

    statistics: Statistics | None = None


METHODS: dict[str, type[Method]] = {}
"""Methods by name; ``METHODS[name](**options)`` builds one."""


class Method(ABC):
    """How to draft. Small, immutable, without state: it may serve any number of runs and models.

    Every method is also what ``model.generate(custom_generate=...)`` expects. A subclass that is
    defined with a name, ``class Vegas(Method, name="vegas")``, joins `METHODS`, where commands,
    benchmarks and tests find it.

    Attributes
    ----------
    name : str
        Under which `METHODS` has it.
    reads_features : bool
        Whether its drafter learns from the prompts' features (`Drafter.on_prefill`).
    """

    name: ClassVar[str]
    reads_features: ClassVar[bool] = False

    def __init_subclass__(cls, *, name: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if name is not None:
            if name in METHODS:
                raise ValueError(f"a method named {name!r} exists: {METHODS[name].__qualname__}")
            cls.name = name
            METHODS[name] = cls

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """The largest tree it proposes, root included: room that the cache must have."""

    def prepared(self, model: PreTrainedModel) -> Method:
        """Return this method with all that it needs for `model` loaded and checked.

        Runs do this by themselves. Doing it before shows errors early, and loads only once.
        """
        return self

    def clipped(self, depth: int) -> Method:
        """Return this method for a run that has no use for longer drafts than `depth` tokens."""
        return self

    def feature_layers(self, model: PreTrainedModel) -> tuple[int, ...]:
        """Return what the features are that its drafter learns from (`CachedModel.hand_out`)."""
        return (HEAD,)

    @abstractmethod
    def start(self, context: DraftContext) -> Drafter:
        """Return a drafter for one run."""

    def _require(self, least: int, *names: str) -> None:
        """Raise where an option that is given is no integer (TypeError), or less than `least`."""
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name}: expected an integer, got {value!r}")
            if value < least:
                said = f"be at least {least}" if least else "not be negative"
                raise ValueError(f"{name} must {said}, got {value}")

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        token_streamer: BaseStreamer | None = None,
        **others: Any,
    ) -> torch.Tensor | SpeculativeOutput:
        """Decode what transformers has prepared.

        Called by ``model.generate(ids, custom_generate=method, ...)``, whose ``streamer``, and
        ``tokenizer`` for ``stop_strings``, are heeded though transformers keeps them back from a
        callable (`kept_back.py`). `token_streamer` and the fields of `RunOptions` can be given to
        ``generate`` as well; they mean what they mean in `specattn.decoding.generate`, the first
        what ``streamer`` does.

        As everywhere in transformers, processors and criteria see the padding before a prompt as
        part of its text; `specattn.decoding.generate` shows them texts alone.

        Returns
        -------
        Tensor, int64 [R, longest], or SpeculativeOutput if ``return_dict_in_generate``
            Prompts with their padding, then the new tokens, padded after each row's end with
            ``pad_token_id``, else ``eos_token_id``, else 0. A row that has met any stopping
            criterion ends there; transformers goes on with it if the model has no end token.

        Raises
        ------
        ValueError
            An option that cannot be obeyed (an ``assistant_model``, too), padding that is not on
            the left, an empty prompt, or prompts that the cache cannot hold.
        """
        others.pop("tokenizer", None)  # transformers has made criteria of the strings
        kept = given_to_generate(self)
        if kept.get("assistant_model") is not None:
            raise ValueError("assistant_model: the method drafts; give one or the other")
        prompted = (streamer := kept.get("streamer")) is not None
        if prompted and token_streamer is not None:
            raise ValueError("streamer and token_streamer: give one of them")
        checked_streamer("token_streamer", token_streamer)
        streamer = streamer if prompted else token_streamer
        given = {name: others.pop(name) for name in _OPTIONS if name in others}
        refuse_unsupported(generation_config, others)
        padding = left_padding(input_ids, others.get("attention_mask"))
        check_positions(padding, input_ids, others.get("position_ids"))
        rows = len(input_ids)
        rules = [logits_processor] * rows, [stopping_criteria] * rows
        texts, options = Texts(list(input_ids), padding, *rules), RunOptions(**given)
        streaming: Any = {"streamer": streamer, "prompted": prompted}
        sequences, statistics = run(self, model, texts, generation_config, options, **streaming)
        output: Any = sequences.padded(pad_token(generation_config)).to(input_ids.device)
        if generation_config.return_dict_in_generate:
            return SpeculativeOutput(sequences=output, statistics=statistics)
        return output


@dataclass(frozen=True)
class RunOptions:
    """What a caller may say of a run, each as for `specattn.decoding.generate`."""

    on_tokens: OnTokens | None = None
    on_round: OnRound | None = None
    on_prefill: OnPrefill | None = None
    generator: torch.Generator | None = None
    seed: int | None = None
    capacity: int | None = None
    num_pregenerated: int = 0
    compile: Compile = "auto"
    kv_dtype: str | None = None
    context_parallel: ContextParallel | None = None
    calibrates: bool = False  # as `DraftContext` has it

    def __post_init__(self) -> None:
        for name in ("on_tokens", "on_round", "on_prefill"):
            checked_function(name, getattr(self, name))
        if not isinstance(self.generator, torch.Generator | None):
            raise TypeError(f"generator: expected a torch.Generator, got {self.generator!r}")
        if not isinstance(ranks := self.context_parallel, ContextParallel | None):
            raise TypeError(f"context_parallel: expected a ContextParallel, got {ranks!r}")


# transformers hands a callable only what its signature names.
_OWN = ("context_parallel", "calibrates")
_OPTIONS = [one.name for one in fields(RunOptions) if one.name not in _OWN]
_own = signature(Method.__call__)
_named = [
    Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in (*_OPTIONS, "tokenizer")
]
_whole = _own.replace(
    parameters=[*list(_own.parameters.values())[:-1], *_named, _own.parameters["others"]]
)
vars(Method)["__call__"].__signature__ = _whole
Method.__signature__ = Signature(_whole)  # type: ignore[attr-defined]


class Texts(NamedTuple):
    """The prompts of a run, each behind its padding, and what transformers has prepared for it."""

    rows: list[torch.Tensor]
    padding: list[int]
    processors: list[LogitsProcessorList]
    criteria: list[StoppingCriteriaList]

    @property
    def limits(self) -> list[int]:
        """Where each row must end; 0 where nothing says so."""
        return [int(criteria.max_length or 0) for criteria in self.criteria]

    @property
    def most_new(self) -> int:
        """The most tokens that may follow a prompt."""
        return max(limit - len(row) for limit, row in zip(self.limits, self.rows, strict=True))

    def room(self, method: Method) -> int:
        """Return the most tokens that a row and a draft behind it can have."""
        return max(self.limits) + method.max_nodes


@torch.no_grad()
def run(
    method: Method,
    model: PreTrainedModel,
    texts: Texts,
    config: GenerationConfig,
    options: RunOptions,
    streamer: BaseStreamer | None = None,
    prompted: bool = False,
) -> tuple[Sequences, Statistics]:
    """Decode prepared texts; `prompted` says that the streamer has been given the prompt."""
    if streamer is not None and len(texts.rows) > 1:
        raise ValueError(
            f"streamer follows one prompt, got {len(texts.rows)}; use on_tokens instead"
        )
    own = {name: getattr(options, name) for name in ("seed", "capacity", "num_pregenerated")}
    checked_numbers(prefill_chunk_size=config.prefill_chunk_size)
    options = replace(options, **checked_numbers(**own))
    model = text_model(model)
    if 0 in texts.limits:
        raise ValueError("the run has no end: give max_new_tokens or max_length")
    method = method.prepared(model).clipped(texts.most_new - 1)
    lengths = [len(row) - begin for row, begin in zip(texts.rows, texts.padding, strict=True)]
    needed = texts.room(method) - min(texts.padding)
    if options.capacity is not None and needed > options.capacity:
        raise ValueError(
            f"the longest prompt has {max(lengths)} tokens; with new tokens and one draft it needs "
            f"room for {needed}, but capacity is {options.capacity}"
        )
    if not 0 <= options.num_pregenerated < min(lengths):
        raise ValueError(
            "num_pregenerated must leave at least one token of a prompt, got "
            f"{options.num_pregenerated}"
        )
    if options.seed is not None and options.generator is not None:
        raise ValueError("give seed or generator, not both")
    if (lockstep := Lockstep.of(model, options.context_parallel)) is not None:
        prompts = [row[begin:] for row, begin in zip(texts.rows, texts.padding, strict=True)]
        draw = options.seed, options.generator
        seed = lockstep.begin(model, method, prompts, texts.limits, *draw, options.kv_dtype)
        options = replace(options, seed=seed)
        texts = texts._replace(criteria=lockstep.criteria(texts.criteria))
    longest = needed - method.max_nodes - 1  # the last token of a text is not read
    settings: Any = {"kv_dtype": options.kv_dtype, "longest": longest, "lasting": True}
    target = Target(model, len(lengths), needed, options.compile, lockstep, **settings)
    context = context_of(target, method, texts, options, do_sample=bool(config.do_sample))
    if streamer is not None and not prompted:
        streamer.put(texts.rows[0][None].cpu())
    with target.in_use():
        drafter = method.start(context)
        statistics = decode(
            context,
            drafter,
            chunk_size=config.prefill_chunk_size or CHUNK_SIZE,
            on_round=announcing(options, streamer),
            on_prefill=options.on_prefill,
        )
        kept = target.workspace.drafters_nbytes + drafter.own_cache_bytes
        statistics.drafter_cache_bytes = kept
    target.give_back()  # after an error it is freed instead: nobody knows how far a pass came
    if streamer is not None:
        streamer.end()
    return context.sequences, statistics


def context_of(
    target: Target, method: Method, texts: Texts, options: RunOptions, *, do_sample: bool
) -> DraftContext:
    """Return what a drafter works with in a run of a method that is clipped to it."""
    if target.cache.states is not None and method.max_nodes > MOST_ROWS:
        raise ValueError(
            f"{method.name} may draft trees of {method.max_nodes} nodes; layers that keep a state "
            f"verify {MOST_ROWS} at most"
        )
    where, room = target.device, texts.room(method)
    pregenerated = options.num_pregenerated
    target.hand_out(method.feature_layers(target.model))
    sequences = Sequences(texts.rows, texts.padding, room, texts.criteria, where, pregenerated)
    seed, generator = options.seed, options.generator
    if do_sample and seed is None:
        source = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**63 - 1, (), generator=generator, device=source))
    elif do_sample and seed is not None:
        generator = torch.Generator(where).manual_seed(seed)
    sampler = Sampler(texts.processors, do_sample, sequences, seed or 0)
    return DraftContext(target, sampler, sequences, generator, options.calibrates)


def announcing(options: RunOptions, streamer: BaseStreamer | None = None) -> OnRound | None:
    """Return one callback for all kinds of listeners."""
    on_round, on_tokens = options.on_round, options.on_tokens
    if on_tokens is streamer is None:
        return on_round

    def announce(request: int, round: Round) -> None:
        if on_round is not None:
            on_round(request, round)
        if streamer is not None:
            streamer.put(torch.tensor(round.tokens, device="cpu"))
        if on_tokens is not None:
            on_tokens(request, round.tokens)

    return announce

"""`generate`: continue prompts with any method, through transformers' own preparation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import signature
from typing import Any, cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from specattn.decoding.engine.loop import OnPrefill, OnRound
from specattn.decoding.engine.method import (
    Method,
    OnTokens,
    RunOptions,
    Texts,
    run,
)
from specattn.decoding.engine.obeyed import (
    checked_function,
    checked_functions,
    checked_streamer,
    refuse_unsupported,
)
from specattn.decoding.methods import METHODS, parse_method
from specattn.decoding.model.quantised import quantised
from specattn.decoding.model.text_model import text_model
from specattn.decoding.passes.replay import Compile
from specattn.decoding.text.numbers import checked_numbers
from specattn.decoding.text.processors import CONTEXT_FREE
from specattn.decoding.text.prompts import Prompts, as_prompts
from specattn.decoding.text.statistics import Statistics
from specattn.distributed.group import ContextParallel


@dataclass
class GenerationOutput:
    """What `generate` returns.

    Attributes
    ----------
    sequences : list of Tensor, int64 [prompt + new]
        Prompt and new tokens of every request, without padding, on the device of its prompt.
    new_tokens : list of list of int
        The new tokens alone, ending with the stop token if one was met.
    statistics : Statistics
    """

    sequences: list[torch.Tensor]
    new_tokens: list[list[int]]
    statistics: Statistics


def generate(
    model: PreTrainedModel,
    input_ids: Prompts,
    method: Method | str = "auto",
    *,
    attention_mask: torch.Tensor | Sequence[Sequence[int]] | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    streamer: BaseStreamer | None = None,
    on_tokens: OnTokens | None = None,
    on_round: OnRound | None = None,
    on_prefill: OnPrefill | None = None,
    capacity: int | None = None,
    num_pregenerated: int = 0,
    compile: Compile = "auto",
    kv_dtype: str | None = None,
    quantize: str | None = None,
    context_parallel: ContextParallel | None = None,
    **options: Any,
) -> GenerationOutput:
    """Continue each prompt as plain decoding would, in fewer passes of the target.

    The output has the distribution of plain decoding, token for token where it is greedy.

    Parameters
    ----------
    model : PreTrainedModel
        A causal model, on one device (docs/models.md), or divided over ranks by transformers' own
        plan (docs/distributed.md). One that reads more continues text alone.
    input_ids : Tensor [L] or [B, L], list of int, str, mapping, or sequence of prompts
        Token ids, or text to be tokenized by `tokenizer`; in a sequence each prompt has its own
        length. A mapping is what a tokenizer returns: ``input_ids`` and ``attention_mask``.
    method : Method or str
        A method, or the name of one, with options if need be: ``"vegas:gamma=4,ratio=0.05"``. By
        default whatever is fastest (`Auto`).
    attention_mask : optional
        As long as the ids; 0 where they are padding, on either side. Without one there is none.
    max_new_tokens : int, optional
        Per request; transformers' default when neither this nor ``max_length`` is set anywhere.
    temperature : float, optional
        0 is greedy decoding, anything above samples; None leaves it to the generation config, as
        for every other option that is not given: the model's own ``generation_config`` may sample
        and filter. The commands obey of it only where a text ends.
    seed, generator : optional
        A seed decides the text, whichever method drafts (docs/sampling.md). Without one it is drawn
        from `generator`, by default torch's global one. Give one of them, not both.
    generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn : optional
        As in `transformers.GenerationMixin.generate`. Processors must be functions of their
        arguments alone. They are asked about no text that a token they forbid, an end token or its
        length rules out, though about drafts behind what another criterion or a stop string ends;
        criteria are asked after every single token of every request. None of them sees padding: a
        request's text is what it would be in a batch of its own.
    stop_strings, tokenizer : optional
        A request stops when its text ends with one of the strings, by default those of
        `generation_config`, then of the model's own; an empty list turns them off. Strings need the
        tokenizer, as prompts do that are text.
    streamer : BaseStreamer, optional
        Gets the prompt, then the new tokens of every round. One prompt only.
    on_tokens : callable, optional
        ``on_tokens(request, tokens)`` after every round, for every request with new tokens.
    on_round : callable, optional
        ``on_round(request, round)`` at the same time: a `Round`, which says who drafted, and which
        of its tokens were.
    on_prefill : callable, optional
        ``on_prefill(done, total)`` before the prefill and after each of its chunks, in tokens; on a
        CPU twice a second within a chunk, too.
    capacity : int, optional
        Tokens that the cache can hold per request, at most. By default what the run may need:
        prompt, new tokens and one draft.
    num_pregenerated : int
        Tokens at the end of every prompt that an earlier run has generated: methods that learn from
        what has been generated learn from them too. Nothing else depends on it.
    compile : {"auto", "on", "off"}
        Whether passes of few rows run as kernel calls alone, on a CPU: where that was found to
        compute what the model computes ("auto"; it says once where it cannot), or else with an
        error, or never. Texts are the same as far as rounding goes (docs/compiling.md).
    kv_dtype : {"int8", "fp8", "fp8_e5m2"}, optional
        Keep keys and values in 8 bits, each token's head with a scale of its own; "fp8" is
        float8_e4m3fn. The distribution is then that of plain decoding over the same cache, and so
        is the text, but where two tokens are nearly as likely: a key may be rounded to the next
        step in a pass over more rows, as in 4 of 5,863 random runs (docs/eight-bits.md).
    quantize : {"int8", "int4", "fp8"}, optional
        Round the weights of linear layers to 8 or 4 bits, once: they are remembered with the model,
        which stays as it is. Texts are then those of plain decoding over the same
        weights (docs/quantised.md).
    context_parallel : ContextParallel, optional
        The ranks that hold the cache together (docs/distributed.md). Every rank, also of a model
        that is divided, makes the same
        call, and every rank's callbacks get the tokens. Criteria must be functions of the text;
        for `StopRequest` and ``max_time`` what rank 0 says counts.
    **options
        Any other field of `GenerationConfig`: ``top_k``, ``top_p``, ``repetition_penalty``, ...
        Note that transformers defaults to ``top_k=50`` when sampling; ``top_k=0`` turns it off.

    Returns
    -------
    GenerationOutput

    Raises
    ------
    TypeError
        An argument is of another kind: a number, a function, a config, a stop string, ...
    ValueError
        A number out of range, something that is no prompt, an unknown method or model family, a
        prompt beyond the capacity, or an option that cannot be obeyed here (beams, scores,
        attentions, ...).
    MemoryError
        On a CPU: it has no room for the cache.
    RanksDisagree, RankLost
        On several ranks: one makes another call, or does not answer.
    """
    options = checked_numbers(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        capacity=capacity,
        num_pregenerated=num_pregenerated,
        **options,
    )
    max_new_tokens, temperature = options.pop("max_new_tokens"), options.pop("temperature")
    given: Any = {n: options.pop(n) for n in ("seed", "capacity", "num_pregenerated")}
    if not isinstance(generation_config, GenerationConfig | None):
        raise TypeError(
            f"generation_config: expected a GenerationConfig, got {generation_config!r}"
        )
    checked_streamer("streamer", streamer)
    checked_function("prefix_allowed_tokens_fn", prefix_allowed_tokens_fn)
    processors = checked_functions("logits_processor", logits_processor)
    criteria = StoppingCriteriaList(checked_functions("stopping_criteria", stopping_criteria))
    method, model = resolved(method), text_model(model)
    if quantize is not None:
        model = quantised(model, quantize)
    vocabulary = model.config.vocab_size
    prompts = as_prompts(input_ids, attention_mask, tokenizer=tokenizer, vocabulary=vocabulary)
    if temperature is not None:
        options.setdefault("do_sample", temperature > 0)
        if temperature > 0:
            options["temperature"] = temperature
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens
    if unknown := [name for name in options if name not in GenerationConfig().to_dict()]:
        known = *GenerationConfig().to_dict(), *signature(generate).parameters
        near = {name: get_close_matches(name, known, n=1, cutoff=0.7) for name in unknown}
        meant = "".join(f"; did you mean {one[0]!r}?" for one in near.values() if one)
        names = ", ".join(unknown)
        raise ValueError(f"neither an argument of generate nor in GenerationConfig: {names}{meant}")
    # The cache is our own, whatever a checkpoint says; who asks for none is told so.
    options.setdefault("use_cache", True)
    if generation_config is not None:  # transformers takes one or the other
        generation_config = copy.deepcopy(generation_config)
        generation_config.update(**options)
        options = {}
        if stop_strings is None:
            stop_strings = generation_config.stop_strings
        generation_config.stop_strings = None
    # transformers keeps the tokenizer back from a callable: strings are ours to look for.
    if model.generation_config.stop_strings is not None:
        options["stop_strings"] = None
    if stop_strings is None:
        stop_strings = model.generation_config.stop_strings or ()
    alone = isinstance(stop_strings, str) or not isinstance(stop_strings, Iterable)
    strings: list[Any] = [stop_strings] if alone else list(stop_strings)
    if not all(isinstance(one, str) for one in strings):
        raise TypeError(f"stop_strings: expected strings, got {stop_strings!r}")
    if strings:
        if tokenizer is None:
            raise ValueError(
                f"stop_strings {strings} need tokenizer=, to know how tokens spell them; "
                "stop_strings=[] turns those of a model's generation_config off"
            )
        if not callable(getattr(tokenizer, "get_vocab", None)):
            raise TypeError(f"tokenizer: expected a tokenizer, got {tokenizer!r}")
        criteria.append(StopStringCriteria(tokenizer, strings))
    texts, config = _prepared(
        model,
        prompts,
        generation_config=generation_config,
        logits_processor=LogitsProcessorList(processors),
        stopping_criteria=criteria,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        **options,
    )
    run_options = RunOptions(
        on_tokens=on_tokens,
        on_round=on_round,
        on_prefill=on_prefill,
        generator=generator,
        compile=compile,
        kv_dtype=kv_dtype,
        context_parallel=context_parallel,
        **given,
    )
    sequences, statistics = run(method, model, texts, config, run_options, streamer)
    new_tokens = [sequences.new_tokens(row) for row in range(len(texts.rows))]
    own = zip(texts.rows, new_tokens, strict=True)
    whole = [torch.cat([prompt, prompt.new_tensor(new)]) for prompt, new in own]
    return GenerationOutput(whole, new_tokens, statistics)


_Prepared = tuple[Texts, GenerationConfig]


def _note(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> _Prepared:
    """Stand in for a method where transformers calls one, and decode nothing."""
    refuse_unsupported(generation_config, model_kwargs)
    rows = len(input_ids)
    rules = [logits_processor] * rows, [stopping_criteria] * rows
    return Texts(list(input_ids), [0] * rows, *rules), generation_config


def _prepared(model: PreTrainedModel, prompts: list[torch.Tensor], **options: Any) -> _Prepared:
    """Let transformers prepare a run in which a text depends on no other, nor on its length.

    Processors and criteria count tokens from the beginning of a row, so those of a prompt are
    prepared as if all prompts were as long: others then stand in for the shorter and longer ones.
    """
    calls = dict[int, _Prepared]()
    for prompt in prompts:
        if (length := len(prompt)) in calls:
            continue
        ids = torch.stack([p if len(p) == length else prompt for p in prompts]).to(model.device)
        calls[length] = cast(Any, model).generate(
            ids, attention_mask=torch.ones_like(ids), custom_generate=_note, **options
        )
    first, config = calls[len(prompts[0])]
    repeats = len(first.rows) // len(prompts)  # num_return_sequences
    rows = [prompt for prompt in prompts for _ in range(repeats)]
    own = [calls[len(row)][0] for row in rows]
    processors = [texts.processors[0] for texts in own]
    if all(type(processor) in CONTEXT_FREE for processor in processors[0]):
        processors = first.processors  # those see no text
    criteria = [texts.criteria[0] for texts in own]
    return Texts(rows, [0] * len(rows), processors, criteria), config


def resolved(method: Method | str) -> Method:
    """Return the method itself, or the one of that name."""
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        is_class = isinstance(method, type) and issubclass(method, Method)
        meant = f"; {method.__name__}() is one" if is_class else ""
        raise TypeError(f"method: expected a Method or the name of one, got {method!r}{meant}")
    try:
        name, options = parse_method(method)
    except ValueError as error:
        raise ValueError(f"method: {error}") from None
    return METHODS[name](**options)

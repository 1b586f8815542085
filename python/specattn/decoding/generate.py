"""`generate`: continue prompts with any method, through transformers' own preparation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
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

from specattn.decoding.loop import OnPrefill, OnTokens
from specattn.decoding.method import Method
from specattn.decoding.methods import METHODS, parse_method
from specattn.decoding.prompts import Prompts, as_prompts
from specattn.decoding.statistics import Statistics


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
    method: Method | str = "vegas",
    *,
    attention_mask: torch.Tensor | Sequence[Sequence[int]] | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    streamer: BaseStreamer | None = None,
    on_tokens: OnTokens | None = None,
    on_prefill: OnPrefill | None = None,
    capacity: int | None = None,
    num_pregenerated: int = 0,
    **options: Any,
) -> GenerationOutput:
    """Continue each prompt as plain decoding would, in fewer passes of the target.

    The output has the distribution of plain decoding, token for token where it is greedy.

    Parameters
    ----------
    model : PreTrainedModel
        A causal model of one of `FAMILIES`, on one device.
    input_ids : Tensor [L] or [B, L], list of int, str, mapping, or sequence of prompts
        Token ids, or text to be tokenized by `tokenizer`; in a sequence each prompt has its own
        length. A mapping is what a tokenizer returns: ``input_ids`` and ``attention_mask``.
    method : Method or str
        A method, or the name of one, with options if need be: ``"vegas:gamma=4,ratio=0.05"``.
    attention_mask : optional
        As long as the ids; 0 where they are padding, on either side. Without one there is none.
    max_new_tokens : int, optional
        Per request; transformers' default when neither this nor ``max_length`` is set anywhere.
    temperature : float, optional
        0 is greedy decoding, anything above samples; None leaves it to the generation config.
    seed, generator : optional
        Source of randomness for this run; by default the device's global generator, as in
        transformers. Give one of them, not both.
    generation_config, logits_processor, stopping_criteria : optional
        As in `transformers.GenerationMixin.generate`. Processors must be functions of their
        arguments alone; criteria are asked after every single token of every request.
    stop_strings, tokenizer : optional
        A request stops when its text ends with one of the strings. Needs the tokenizer, which
        prompts that are text need too.
    streamer : BaseStreamer, optional
        Gets the prompt, then the new tokens of every round. One prompt only.
    on_tokens : callable, optional
        ``on_tokens(request, tokens)`` after every round, for every request with new tokens.
    on_prefill : callable, optional
        ``on_prefill(done, total)`` before the prefill and after each of its chunks, in tokens.
    capacity : int, optional
        Tokens that the cache can hold per request, at most. By default what the run may need:
        prompt, new tokens and one draft.
    num_pregenerated : int
        Tokens at the end of every prompt that an earlier run has generated: methods that learn from
        what has been generated learn from them too. Nothing else depends on it.
    **options
        Any other field of `GenerationConfig`: ``top_k``, ``top_p``, ``repetition_penalty``, ...
        Note that transformers defaults to ``top_k=50`` when sampling; ``top_k=0`` turns it off.

    Returns
    -------
    GenerationOutput

    Raises
    ------
    ValueError
        Something that is no prompt, an unknown method or model family, a prompt beyond the
        capacity, or an option that cannot be obeyed here (beams, scores, attentions, assistants, ...).
    """
    method = _resolve(method)
    vocabulary = model.get_input_embeddings().num_embeddings
    prompts = as_prompts(input_ids, attention_mask, tokenizer=tokenizer, vocabulary=vocabulary)
    if streamer is not None and len(prompts) > 1:
        raise ValueError(f"streamer follows one prompt, got {len(prompts)}; use on_tokens instead")
    if temperature is not None:
        options.setdefault("do_sample", temperature > 0)
        if temperature > 0:
            options["temperature"] = temperature
    if max_new_tokens is not None:
        options["max_new_tokens"] = max_new_tokens
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer, to know how tokens spell them")
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        criteria.append(StopStringCriteria(tokenizer, strings))
    options["return_dict_in_generate"] = True
    if generation_config is not None:  # transformers takes one or the other
        generation_config = copy.deepcopy(generation_config)
        if unknown := generation_config.update(**options):
            raise ValueError(f"not in GenerationConfig: {', '.join(unknown)}")
        options = {}
    padded, mask = _left_padded(prompts, model)
    output = cast(Any, model).generate(
        padded,
        attention_mask=mask,
        custom_generate=method,
        generation_config=generation_config,
        logits_processor=LogitsProcessorList(logits_processor or []),
        stopping_criteria=criteria,
        token_streamer=streamer,
        on_tokens=on_tokens,
        on_prefill=on_prefill,
        generator=generator,
        seed=seed,
        capacity=capacity,
        num_pregenerated=num_pregenerated,
        **options,
    )
    width, statistics = padded.shape[1], output.statistics
    new_tokens = [
        row[width : width + request.new_tokens].tolist()
        for row, request in zip(output.sequences, statistics.requests, strict=True)
    ]
    repeats = len(new_tokens) // len(prompts)  # num_return_sequences
    sequences = [
        torch.cat([prompts[row // repeats], prompts[row // repeats].new_tensor(new)])
        for row, new in enumerate(new_tokens)
    ]
    return GenerationOutput(sequences, new_tokens, statistics)


def _resolve(method: Method | str) -> Method:
    """Return the method itself, or the one of that name."""
    if isinstance(method, Method):
        return method
    try:
        name, options = parse_method(method)
    except ValueError as error:
        raise ValueError(f"method: {error}") from None
    return METHODS[name](**options)


def _left_padded(
    prompts: list[torch.Tensor], model: PreTrainedModel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts as one rectangle, padded on the left, and its attention mask."""
    pad = model.generation_config.pad_token_id
    width = max(len(prompt) for prompt in prompts)
    padded = torch.full((len(prompts), width), 0 if pad is None else pad, device=model.device)
    mask = torch.zeros_like(padded)
    for row, prompt in enumerate(prompts):
        padded[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return padded, mask

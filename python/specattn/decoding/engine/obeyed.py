"""What a caller of ``generate`` may ask: all else is refused rather than ignored."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

# Options that would change the output or its shape and that this loop cannot obey. Each is allowed
# the values that ask for nothing.
_UNSUPPORTED = {
    "num_beams": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "guidance_scale": (None, 1),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "use_mtp": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
}
_STREAMS = ("put", "end")  # what a streamer is called for
_CACHES = ("cache", "past_key_values")  # what transformers calls its own: the second until 5.23


def refuse_unsupported(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raise rather than ignore what cannot be obeyed."""
    for name, harmless in _UNSUPPORTED.items():
        if (value := getattr(config, name, None)) not in harmless:
            raise ValueError(f"{name}={value!r} is not possible with speculative decoding")
    for name in _CACHES:
        past = model_kwargs.get(name)
        if past is not None and past.get_seq_length() > 0:
            raise ValueError(f"{name} must be empty: the cache is our own")
    known = {"attention_mask", "position_ids", *_CACHES, "use_cache", "logits_to_keep"}
    model_kwargs = {
        name: value
        for name, value in model_kwargs.items()
        # A model that reads images is given what has been seen: nothing.
        if value is not None and not (isinstance(value, dict) and not value)
    }
    if unknown := [name for name in model_kwargs if name not in known]:
        raise ValueError(f"model arguments that cannot be passed on: {', '.join(unknown)}")


def checked_function(name: str, given: Any) -> None:
    """Raise TypeError unless an argument is a function, or None."""
    if given is not None and not callable(given):
        raise TypeError(f"{name}: expected a function, got {given!r}")


def checked_functions(name: str, given: Any) -> list[Any]:
    """Return the functions of a list, none of None; TypeError unless it is one."""
    if given is None:
        return []
    if not isinstance(given, list | tuple) or not all(map(callable, given)):
        raise TypeError(f"{name}: expected a list of functions, got {given!r}")
    return list(given)


def checked_streamer(name: str, given: Any) -> None:
    """Raise TypeError unless an argument is a streamer, or None."""
    if given is not None and not all(callable(getattr(given, one, None)) for one in _STREAMS):
        raise TypeError(f"{name}: expected a streamer with put and end, got {given!r}")


def left_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """Return how many padding tokens precede each prompt."""
    rows, width = input_ids.shape
    if attention_mask is None:
        padding = [0] * rows
    else:
        mask = attention_mask.bool()
        if tuple(mask.shape) != (rows, width) or (mask[:, :-1] & ~mask[:, 1:]).any():
            raise ValueError("attention_mask must be [B, L] and mask padding on the left alone")
        padding = (~mask).sum(1).tolist()
    if max(padding) >= width:
        raise ValueError("each prompt must have at least one token, got an empty one")
    return padding


def check_positions(
    padding: list[int], input_ids: torch.Tensor, position_ids: torch.Tensor | None
) -> None:
    """Raise unless positions count from 0 at each prompt's first token."""
    if position_ids is None:
        return
    count = (
        torch.arange(input_ids.shape[1], device="cpu")
        - torch.tensor(padding, device="cpu")[:, None]
    )
    # Models that read images have several positions, which are alike in a text.
    given = position_ids.cpu().expand(*position_ids.shape[:-2], len(padding), -1)
    if given.shape[-2:] != count.shape or ((count >= 0) & (given != count)).any():
        raise ValueError("position_ids must count from 0 at the first token of each prompt")


def pad_token(config: GenerationConfig) -> int:
    """Return what fills the rows that ended early, chosen as transformers does."""
    if config.pad_token_id is not None:
        return config.pad_token_id
    ends = torch.tensor(0 if config.eos_token_id is None else config.eos_token_id, device="cpu")
    return int(ends.flatten()[0])

"""Prompts in the forms that callers have them: text, ids, or what a tokenizer returns."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

Prompt = torch.Tensor | Sequence[int] | str
Prompts = Prompt | Sequence[Prompt] | Mapping[str, Any]


def as_prompts(
    given: Prompts, attention_mask: Any = None, *, tokenizer: Any = None, vocabulary: int
) -> list[torch.Tensor]:
    """Return the prompts without padding, each int64 [L]; parameters as for `generate`.

    ValueError names what is no prompt and what came.
    """
    if isinstance(given, Mapping):
        known = ("input_ids", "attention_mask", "token_type_ids")  # these models have no types
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"input_ids: cannot pass on {', '.join(unknown)}")
        if "input_ids" not in given:
            raise ValueError("input_ids: expected a mapping that has them")
        if attention_mask is None:
            attention_mask = given.get("attention_mask")
        given = given["input_ids"]
    prompts = _rows(given)
    masks = [None] * len(prompts) if attention_mask is None else _rows(attention_mask)
    if not prompts:
        raise ValueError("input_ids must hold at least one prompt, got none")
    if len(masks) != len(prompts):
        raise ValueError(
            f"attention_mask must have a row per prompt, {len(prompts)}, got {len(masks)}"
        )
    return [
        _unpadded(number, _ids(number, prompt, tokenizer, vocabulary), mask)
        for number, (prompt, mask) in enumerate(zip(prompts, masks, strict=True))
    ]


def _rows(given: Any) -> list[Any]:
    """Return one entry per prompt of what may be a single one."""
    if isinstance(given, torch.Tensor):
        return [given] if given.dim() < 2 else list(given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        return [given]
    rows = list(given)
    return [rows] if rows and all(isinstance(entry, Integral) for entry in rows) else rows


def _ids(number: int, prompt: Any, tokenizer: Any, vocabulary: int) -> torch.Tensor:
    """Return one prompt's ids, padding included."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"prompt {number} is text: give tokenizer(...) of it, or tokenizer=")
        if not callable(tokenizer):
            raise TypeError(f"tokenizer: expected a tokenizer, got {tokenizer!r}")
        prompt = tokenizer(prompt)["input_ids"]
    ids = _tensor(prompt, f"prompt {number} must be token ids")
    if ids.dim() != 1 or ids.numel() == 0:
        raise ValueError(
            f"each prompt must be a 1-D tensor of at least one token, got prompt {number} "
            f"of shape {list(ids.shape)}"
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"prompt {number} must hold integers, got {ids.dtype}")
    if ((ids < 0) | (ids >= vocabulary)).any():
        raise ValueError(
            f"prompt {number} must hold token ids from 0 to {vocabulary - 1}, got "
            f"{int(ids.min())} to {int(ids.max())}"
        )
    return ids.long()


def _tensor(given: Any, wanted: str) -> torch.Tensor:
    """Return a tensor of numbers, on its own device; ValueError: it is none, but was `wanted`."""
    if isinstance(given, torch.Tensor):
        return given
    try:
        return torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{wanted}, got {reprlib.repr(given)}") from None


def _unpadded(number: int, ids: torch.Tensor, mask: Any) -> torch.Tensor:
    """Return the ids that a mask keeps: padding may be on either side."""
    if mask is None:
        return ids
    kept = _tensor(mask, f"attention_mask of prompt {number} must be zeros and ones").to(ids.device)
    kept = kept.bool()
    if kept.shape != ids.shape:
        raise ValueError(
            f"attention_mask of prompt {number} must be as long as its ids, {list(ids.shape)}, "
            f"got {list(kept.shape)}"
        )
    (places,) = kept.nonzero(as_tuple=True)
    if len(places) == 0:
        raise ValueError(f"prompt {number} must have at least one token, got an empty one")
    begin, end = int(places[0]), int(places[-1]) + 1
    if end - begin != len(places):
        raise ValueError(f"attention_mask of prompt {number} must not have gaps")
    return ids[begin:end]

"""The options of a run that are numbers: of which kind each is, and from where to where it goes."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch


class _Range(NamedTuple):
    """Finite numbers of a kind from `least` to `most`; `above` leaves `least` out."""

    kind: Any
    least: float
    most: float = math.inf
    above: bool = False

    def __str__(self) -> str:
        """Return it in words."""
        start = f"{'above' if self.above else 'from'} {self.least:g}"
        end = "on, finite" if self.most == math.inf else f"to {self.most:g}"
        return f"{self.name} {start} {end}"

    @property
    def name(self) -> str:
        """What a number of its kind is called."""
        return "an integer" if self.kind is Integral else "a number"


_SHARE, _POSITIVE_SHARE = _Range(Real, 0, 1), _Range(Real, 0, 1, above=True)
_COUNT, _AMOUNT = _Range(Integral, 1), _Range(Integral, 0)
_POSITIVE = _Range(Real, 0, above=True)
_RANGES = {
    "temperature": _Range(Real, 0),
    "top_k": _AMOUNT,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "top_h": _POSITIVE_SHARE,
    "typical_p": _POSITIVE_SHARE,
    "epsilon_cutoff": _SHARE,
    "eta_cutoff": _SHARE,
    "repetition_penalty": _POSITIVE,
    "encoder_repetition_penalty": _POSITIVE,
    "no_repeat_ngram_size": _AMOUNT,
    "encoder_no_repeat_ngram_size": _AMOUNT,
    "max_new_tokens": _COUNT,
    "max_length": _COUNT,
    "min_new_tokens": _AMOUNT,
    "min_length": _AMOUNT,
    "max_time": _Range(Real, 0),
    "num_return_sequences": _COUNT,
    "prefill_chunk_size": _COUNT,
    "capacity": _COUNT,
    "num_pregenerated": _AMOUNT,
    "seed": _Range(Integral, -(2**63), 2**64 - 1),  # as for torch.manual_seed
}


def checked_numbers(**given: Any) -> dict[str, Any]:
    """Return options with their numbers as int and float; what is None, and other options, stay.

    NumPy's numbers and tensors without dimensions are numbers, too; transformers takes floats alone
    for some. TypeError: one is of another kind. ValueError: it is out of range, or not finite.
    """
    for name in given.keys() & _RANGES.keys():
        value, allowed = given[name], _RANGES[name]
        if value is None:
            continue
        found: Any = value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        if isinstance(found, bool) or not isinstance(found, allowed.kind):
            raise TypeError(f"{name}: expected {allowed.name}, got {value!r}")
        inside = allowed.least <= found <= allowed.most and found != math.inf
        if not inside or allowed.above and found == allowed.least:
            raise ValueError(f"{name} must be {allowed}, got {value!r}")
        given[name] = int(found) if allowed.kind is Integral else float(found)
    return given

"""Arguments of ``model.generate`` that transformers keeps back from a callable.

A decoding of its own gets ``streamer``, ``tokenizer`` and ``assistant_model``; what is given as
``custom_generate`` does not, though the prompt has been put into the streamer. They are found where
`generate` holds them, in its frame: nothing of transformers is replaced.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

from transformers import GenerationMixin

_ASKS = "_extract_generation_mode_kwargs"  # it takes the tokenizer, then asks for our signature


def given_to_generate(method: Any) -> dict[str, Any]:
    """Return what the ``generate`` that calls a method was given; empty where none does."""
    frame = _frame_of(GenerationMixin.generate)
    found = {} if frame is None else frame.f_locals
    return found if found.get("custom_generate") is method else {}


class Signature:
    """The signature of a method, by which transformers knows what it may be handed.

    The tokenizer that it has taken from what it hands on is put back when it asks: so it finds
    stop strings with it, as for its own decodings.
    """

    def __init__(self, signature: inspect.Signature):
        own = [one for name, one in signature.parameters.items() if name != "self"]
        self.signature = signature.replace(parameters=own)

    def __get__(self, method: Any, owner: Any = None) -> inspect.Signature:
        """Return the signature of a call; classes have that of their own ``__init__``."""
        if method is None:
            raise AttributeError("__signature__")
        frame = _frame_of(getattr(GenerationMixin, _ASKS, None))
        if frame is not None and frame.f_locals.get("custom_generate") is method:
            kept, handed_on = (
                frame.f_locals.get(name, {}) for name in ("generation_mode_kwargs", "kwargs")
            )
            if "tokenizer" in kept:
                handed_on.setdefault("tokenizer", kept["tokenizer"])
        return self.signature


def _frame_of(function: Any) -> FrameType | None:
    """Return the innermost running call of a function."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame

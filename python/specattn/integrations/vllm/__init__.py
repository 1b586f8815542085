"""specattn in vLLM: attention backends, and drafters for its speculative decoding.

vLLM finds `register` by its entry point and calls it in every process. It does nothing unless
``SPECATTN_VLLM=1``. (docs/vllm.md)
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .plugin import register

__all__ = ["Auto", "PromptLookup", "Suffix", "Vegas", "register"]

_DRAFTERS = {
    "Auto": ".auto",
    "PromptLookup": ".lookup",
    "Suffix": ".lookup",
    "Vegas": ".vegas",
}


def __getattr__(name: str) -> Any:
    """Import a drafter when vLLM needs it: every process of vLLM imports this package."""
    if name not in _DRAFTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_DRAFTERS[name], __name__), name)

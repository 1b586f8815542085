"""Attention primitives for speculative decoding over long contexts, and the layers built on them.

The primitives and their contract: `specattn.ops`. Their meaning: `specattn.reference`. Trees of
drafted tokens: `specattn.Tree`. Which of them survive: `specattn.acceptance`. Decoding Hugging Face
models: `specattn.decoding`, imported on its own because it needs transformers.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .ops import *  # noqa: F403

if TYPE_CHECKING or "specattn_command" not in sys.modules:
    from ._public import *  # noqa: F403
    from ._public import __all__ as __all__
else:  # the program `specattn` answers -h without torch, whose import takes seconds

    def __getattr__(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        public = importlib.import_module("specattn._public")
        globals().update({one: getattr(public, one) for one in public.__all__})
        globals()["__all__"] = public.__all__
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module 'specattn' has no attribute {name!r}") from None

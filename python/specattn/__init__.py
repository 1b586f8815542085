"""Attention primitives for speculative decoding over long contexts, and the layers built on them.

The primitives and their contract: `specattn.ops`. Their meaning: `specattn.reference`. Trees of
drafted tokens: `specattn.Tree`. Which of them survive: `specattn.acceptance`. Decoding Hugging Face
models: `specattn.decoding`, imported on its own because it needs transformers.
"""

from . import acceptance, ops
from ._version import __version__ as __version__
from .backends import backends, use_backend
from .ops import *  # noqa: F403 - every primitive, named once in `ops`
from .tree import Tree
from .warming import warmup

__all__ = ["Tree", "acceptance", "backends", "use_backend", "warmup"]
__all__ += ops.__all__

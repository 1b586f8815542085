"""What `import specattn` offers; importing `ops` also defines the torch operators."""

from . import acceptance, ops
from .backends import backends, use_backend
from .ops import *  # noqa: F403 - every primitive, named once in `ops`
from .tree import Tree
from .warming import warmup

__all__ = ["Tree", "acceptance", "backends", "use_backend", "warmup"]
__all__ += ops.__all__

"""The implementations of the primitives, a record each, and the choice among them.

A backend is a file with a `Backend` record, and its place in `select.BACKENDS`.
"""

from .select import backends, use_backend

__all__ = ["backends", "use_backend"]

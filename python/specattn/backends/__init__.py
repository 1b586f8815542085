"""The implementations of the primitives, a record each, and the choice among them.

A backend is a file with a `Backend` record, and its place in the order of preference here.
"""

from . import cpu, cuda, reference, triton
from .select import BACKENDS, backends, use_backend

__all__ = ["backends", "use_backend"]

for _one in (cuda, triton, cpu, reference):
    BACKENDS[_one.BACKEND.name] = _one.BACKEND

"""Gives a small model the sizes of a real one without changing what it computes.

Texts and acceptance stay those of the trained model, while a pass costs what it costs in the real
one. Drafters that lie beside it are widened with it. (*Net2Net: Accelerating Learning via Knowledge
Transfer*, arXiv 1511.05641.)
"""

from specattn.widening.checks import Exactness
from specattn.widening.embedded import widened_target
from specattn.widening.multiples import Multiples
from specattn.widening.source import Source
from specattn.widening.write import widen

__all__ = ["Exactness", "Multiples", "Source", "widen", "widened_target"]

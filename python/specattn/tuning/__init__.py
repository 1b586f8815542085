"""Finds a method's options for a model, a machine and texts of the user's, by measuring.

Vegas' three steps (*Vegas*, section 3.4) are `vegas.Tuner`; ``specattn tune vegas`` runs them.
"""

from specattn.tuning.record import Record
from specattn.tuning.vegas import Sweep, Tuner

__all__ = ["Record", "Sweep", "Tuner"]

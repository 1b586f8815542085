"""Predict the time of a decode round, and which method should win, without running a model.

Bytes and operations come from the primitives' own formulas and the model's shape; what a machine
makes of them comes from its data sheet or from a result file of ``bench/run_kernels.py``.
"""

from .acceptance import METHOD_PROFILES, PROFILES, AcceptanceProfile, method_profile
from .links import LINKS, Link
from .machines import MACHINES, Machine
from .models import MODELS, ModelShape
from .passes import PassTime, Workload, pass_time
from .predict import Prediction, predict
from .validate import Check, checks

__all__ = [
    "LINKS",
    "MACHINES",
    "METHOD_PROFILES",
    "MODELS",
    "PROFILES",
    "AcceptanceProfile",
    "Check",
    "Link",
    "Machine",
    "ModelShape",
    "PassTime",
    "Prediction",
    "Workload",
    "checks",
    "method_profile",
    "pass_time",
    "predict",
]

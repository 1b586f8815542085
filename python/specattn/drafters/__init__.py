"""Draft models: their configuration, their equations, and how they are saved and loaded."""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "specattn.drafters needs transformers 5: pip install 'specattn[hf]'"
    ) from error

from specattn.drafters.dflash import DFlashConfig, DFlashDrafter
from specattn.drafters.drafter import DrafterConfig, TrainedDrafter
from specattn.drafters.eagle3 import Eagle3Drafter
from specattn.drafters.eagle3_config import Eagle3Config
from specattn.drafters.heads import (
    Heads,
    MedusaConfig,
    MedusaHeads,
    TokenSwiftConfig,
    TokenSwiftHeads,
)
from specattn.drafters.longspec import LongSpecConfig, LongSpecDrafter
from specattn.drafters.mtp import MtpConfig, MtpDrafter
from specattn.drafters.poss import PosSConfig, PosSDrafter
from specattn.drafters.speculators import load_speculators, save_speculators

__all__ = [
    "DFlashConfig",
    "DFlashDrafter",
    "DrafterConfig",
    "Eagle3Config",
    "Eagle3Drafter",
    "Heads",
    "LongSpecConfig",
    "LongSpecDrafter",
    "MedusaConfig",
    "MedusaHeads",
    "MtpConfig",
    "MtpDrafter",
    "PosSConfig",
    "PosSDrafter",
    "TokenSwiftConfig",
    "TokenSwiftHeads",
    "TrainedDrafter",
    "load_speculators",
    "save_speculators",
]

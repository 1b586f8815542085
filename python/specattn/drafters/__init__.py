"""Draft models: their configuration, their equations, and how they are saved and loaded."""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "specattn.drafters needs transformers 5: pip install 'specattn[hf]'"
    ) from error

from specattn.drafters.drafter import DrafterConfig, TrainedDrafter
from specattn.drafters.longspec import LongSpecConfig, LongSpecDrafter

__all__ = ["DrafterConfig", "LongSpecConfig", "LongSpecDrafter", "TrainedDrafter"]

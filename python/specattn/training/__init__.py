"""Training of drafters for a frozen target, on `transformers.Trainer`.

What every method shares: text as a stream of packed rows (`data`), the loss of a frozen head
(`loss`), what the target computes on the way (`target`), and a trainer that saves the drafter alone
and measures acceptance (`trainer`). A method adds one file with its `Recipe`: presets, the drafter
to begin with, and an `Objective`, a module of target and drafter whose forward is the loss.
"""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "specattn.training needs transformers 5 and accelerate: pip install 'specattn[train]'"
    ) from error

from specattn.training.data import Documents, PackedRows, find_files
from specattn.training.dflash import DFLASH_PRESET, BlockPreset, DFlashObjective, DFlashRecipe
from specattn.training.eagle3 import (
    EAGLE3_PRESET,
    Eagle3Objective,
    Eagle3Recipe,
    TestTimePreset,
)
from specattn.training.features import FeatureCache
from specattn.training.heads import HeadsObjective, MedusaRecipe, TokenSwiftRecipe
from specattn.training.longspec import STAGES, LongSpecObjective, LongSpecRecipe, Stage
from specattn.training.loss import linear_cross_entropy, soft_cross_entropy
from specattn.training.mtp import MTP_PRESET, MtpObjective, MtpPreset, MtpRecipe
from specattn.training.positions import anchor_offset_positions
from specattn.training.poss import VARIANTS, PosSObjective, PosSRecipe, Variant
from specattn.training.recipe import Objective, Preset, Recipe
from specattn.training.trainer import DrafterTrainer

__all__ = [
    "DFLASH_PRESET",
    "EAGLE3_PRESET",
    "MTP_PRESET",
    "STAGES",
    "VARIANTS",
    "BlockPreset",
    "DFlashObjective",
    "DFlashRecipe",
    "Documents",
    "DrafterTrainer",
    "Eagle3Objective",
    "Eagle3Recipe",
    "FeatureCache",
    "HeadsObjective",
    "LongSpecObjective",
    "LongSpecRecipe",
    "MedusaRecipe",
    "MtpObjective",
    "MtpPreset",
    "MtpRecipe",
    "Objective",
    "PackedRows",
    "PosSObjective",
    "PosSRecipe",
    "Preset",
    "Recipe",
    "Stage",
    "TokenSwiftRecipe",
    "TestTimePreset",
    "Variant",
    "anchor_offset_positions",
    "find_files",
    "linear_cross_entropy",
    "soft_cross_entropy",
]

"""Training of drafters for a frozen target, on `transformers.Trainer`.

What every method shares: text as a stream of packed rows (`data`), the loss of a frozen head
(`loss`), what the target computes on the way (`target`), and a trainer that saves the drafter alone
and measures acceptance (`trainer`). A method adds one file with its objective, a module of target
and drafter whose forward is the loss: `longspec` has LongSpec's, with its stages as presets.
"""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "specattn.training needs transformers 5 and accelerate: pip install 'specattn[train]'"
    ) from error

from specattn.training.data import Documents, PackedRows, find_files
from specattn.training.longspec import STAGES, LongSpecObjective, Stage
from specattn.training.loss import linear_cross_entropy
from specattn.training.positions import anchor_offset_positions
from specattn.training.trainer import DrafterTrainer

__all__ = [
    "STAGES",
    "Documents",
    "DrafterTrainer",
    "LongSpecObjective",
    "PackedRows",
    "Stage",
    "anchor_offset_positions",
    "find_files",
    "linear_cross_entropy",
]

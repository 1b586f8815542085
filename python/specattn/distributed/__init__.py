"""One text on several devices, over `torch.distributed`: docs/distributed.md."""

from specattn.distributed.group import ContextParallel, RankLost, Ranks, RanksDisagree
from specattn.distributed.tensor import TensorParallel

__all__ = ["ContextParallel", "RankLost", "Ranks", "RanksDisagree", "TensorParallel"]

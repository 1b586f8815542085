"""One text on several devices, over `torch.distributed`: docs/distributed.md."""

from specattn.distributed.group import ContextParallel, RankLost, RanksDisagree

__all__ = ["ContextParallel", "RankLost", "RanksDisagree"]

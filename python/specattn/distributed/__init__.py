"""Sharding one text's KV cache, or a model's layers, over ranks of `torch.distributed`."""

from specattn.distributed.group import ContextParallel, RankLost, Ranks, RanksDisagree
from specattn.distributed.tensor import TensorParallel

__all__ = ["ContextParallel", "RankLost", "Ranks", "RanksDisagree", "TensorParallel"]

"""A model whose layers are divided over ranks by transformers' own plan (``tp_plan``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specattn.distributed.group import Ranks

_KEY_PROJECTIONS = ("k_proj", "qkv_proj")


class TensorParallel(Ranks):
    """The ranks that hold the parts of one model.

    The model itself says so: loaded with transformers' ``DistributedConfig(tp_plan="auto")`` its
    weights are `DTensor`. Its layers exchange what they need by themselves.

    Parameters
    ----------
    group : ProcessGroup
    divides_heads : bool
        Whether each rank attends with its own heads. Some plans gather them first (Phi-3, OLMo 2).

    Attributes
    ----------
    rank, size, sent_bytes
        As for `Ranks`. What transformers' own modules send is not counted.
    """

    def __init__(self, group: Any, *, divides_heads: bool):
        super().__init__(group)
        self.divides_heads = divides_heads

    @staticmethod
    def of(model: Any) -> TensorParallel | None:
        """Return the ranks that `model` is divided over, None where it is whole: made anew."""
        meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
        mesh = next((mesh for mesh in meshes if mesh is not None), None)
        if mesh is None:
            return None
        group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        plan = getattr(model, "tp_plan", None) or model.config.base_model_tp_plan or {}
        divided = any(
            rule.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise"
            for rule, style in plan.items()
        )
        return TensorParallel(group, divides_heads=divided)

    def heads(self, q_heads: int, kv_heads: int) -> tuple[int, int]:
        """Return how many query and KV heads this rank attends with; ValueError where uneven."""
        if not self.divides_heads:
            return q_heads, kv_heads
        if kv_heads % self.size or q_heads % self.size:
            raise ValueError(
                f"tensor parallelism over {self.size} ranks needs a multiple of so many heads, got "
                f"{q_heads} query and {kv_heads} KV heads"
            )
        return q_heads // self.size, kv_heads // self.size

    def mean(self, scores: torch.Tensor) -> torch.Tensor:
        """Average scores of this rank's heads over all of them, in place."""
        self.sum_in_place("scores", scores)
        return scores.div_(self.size)

    def sum_in_place(self, purpose: str, x: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        self.reduce(purpose, x, "sum")

    def join(self, purpose: str, own: torch.Tensor, out: torch.Tensor) -> None:
        """Write columns of all ranks, each [M, N / ranks], side by side to `out` [M, N]."""
        (parts,) = self.gather(purpose, own)
        out.unflatten(1, (self.size, -1)).copy_(parts.movedim(0, 1))

    def by_heads(
        self, q: torch.Tensor, attend: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with queries of all heads, [B, T, Hq, D], to keys that are divided by heads.

        `attend` does so with this rank's heads. Returns the state (out, lse) of all heads.
        """
        if not self.divides_heads:
            return attend(q)
        own = q.chunk(self.size, 2)[self.rank].contiguous()
        outs, lses = self.gather("attention", *attend(own))
        return torch.cat(outs.unbind(), 2), torch.cat(lses.unbind(), 2)

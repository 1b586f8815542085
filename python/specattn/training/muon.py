"""Muon for a drafter's matrices, AdamW for its norms and biases, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """What learns from few tokens where matrices are most of the weights (Muon, Jordan 2024).

    Groups, and so schedules of learning rates, are both optimizers'.

    Parameters
    ----------
    model : nn.Module
        Whose parameters learn, of those that require a gradient.
    matrix_rate : float
        Muon's learning rate.
    weight_decay : float
        Of the matrices.
    **options
        AdamW's.
    """

    def __init__(
        self, model: nn.Module, *, matrix_rate: float, weight_decay: float = 0.0, **options: Any
    ):
        learning = [p for p in model.parameters() if p.requires_grad]
        super().__init__(learning, {})
        matrices = [p for p in learning if p.ndim == 2]
        others = [p for p in learning if p.ndim != 2]
        self.parts: tuple[Optimizer, ...] = (
            Muon(matrices, lr=matrix_rate, weight_decay=weight_decay),
            AdamW(others, weight_decay=0.0, **options),
        )
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of both."""
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the state of both."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]

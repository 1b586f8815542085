"""Kernel calls over fixed memory, recorded while they run and then run again in one go.

On a CPU what a CUDA graph is on a GPU: what Python does between the calls is paid for once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import specattn._cpu as _cpu
from specattn.decoding.model.parts import Projection

UNIFORM = (None, None)  # cu_seqlens_q and max_seqlen_q of attention: all requests have as many rows


class Recording:
    """Kernel calls, and steps in Python between them."""

    def __init__(self) -> None:
        self._steps: list[Any] = [_cpu.Graph()]

    def kernel(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a kernel of `specattn._cpu` now, and in every replay on the same memory."""
        with self._steps[-1]:
            function(*arguments, torch.get_num_threads())

    def product(
        self,
        x: torch.Tensor,
        projections: Sequence[Projection],
        out: torch.Tensor,
        *,
        gate: str | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Multiply rows [M, K] with weights; the results lie side by side in `out`.

        With `gate`, an activation, there are two, and the result is ``gate(first) * second``.
        `residual` is added to it, and may be `out`.
        """
        weights, biases = zip(*projections, strict=True)
        self.kernel(_cpu.linear_parts, x, weights, biases, gate, residual, out)

    def python(self, function: Callable[[], None]) -> None:
        """Run a function now, and in every replay."""
        function()
        self._steps += [function, _cpu.Graph()]

    def replay(self) -> None:
        """Run everything again, on what its tensors hold now."""
        threads = torch.get_num_threads()
        for step in self._steps:
            if isinstance(step, _cpu.Graph):
                step.replay(threads)
            else:
                step()

"""Weights of 8 and 4 bits in the layout that `linear_few_rows` reads, and how they are made."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from specattn.reference._codes import dequantised, pack_nibbles, unpack_nibbles

_ROWS, _ROWS_OF_GPU = 64, 2048  # rounded at once
_IN_KERNELS = (torch.float32, torch.bfloat16, torch.float16)

__all__ = ["QuantisedWeight", "pack_nibbles", "quantise", "unpack_nibbles"]


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """Weights ``(code - zero) * scale``, [N, K], as `specattn.linear_few_rows` takes them.

    `codes` are int8 [N, K], or of 4 bits and packed, uint8; `scale` and `zero`, which may be None,
    are [N, groups]. `depth` is K.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    depth: int

    def __len__(self) -> int:
        """Return N."""
        return len(self.codes)

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.codes.dtype == torch.uint8 else 8

    def laid(self) -> QuantisedWeight:
        """Return them with scales and zero points as kernels of their device read them.

        On a CPU those of a row lie side by side, elsewhere those of a group.
        """
        by_rows = self.scale.device.type == "cpu"

        def lay(x: torch.Tensor) -> torch.Tensor:
            return x.contiguous() if by_rows else x.t().contiguous().t()

        zero = None if self.zero is None else lay(self.zero)
        return QuantisedWeight(self.codes, lay(self.scale), zero, self.depth)

    def split(self, sizes: Sequence[int]) -> list[QuantisedWeight]:
        """Return the same weights in parts of so many rows."""
        zeros = [None] * len(sizes) if self.zero is None else self.zero.split(list(sizes))
        parts = zip(
            self.codes.split(list(sizes)), self.scale.split(list(sizes)), zeros, strict=True
        )
        return [QuantisedWeight(*part, self.depth) for part in parts]

    def dequantised(self, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weights [N, K], computed in float32 at least, rounded to a dtype.

        `out`, if it is given, is where they go: [N, K] of that dtype.
        """
        if self.codes.device.type == "cpu" and dtype in _IN_KERNELS and find_spec("specattn._cpu"):
            out = torch.empty(len(self), self.depth, dtype=dtype) if out is None else out
            coded = self.codes, self.scale, self.zero
            kernels = importlib.import_module("specattn._cpu")  # where it was built
            kernels.dequantise(*coded, out, torch.get_num_threads())
            return out
        wide = torch.promote_types(dtype, torch.float32)
        found = dequantised(self.codes, self.scale, self.zero, self.depth, wide).to(dtype)
        return found if out is None else out.copy_(found)


def quantise(weight: torch.Tensor, bits: int, group: int | None = 64) -> QuantisedWeight:
    """Round weights to the nearest codes, without zero points.

    Parameters
    ----------
    weight : Tensor [N, K]
        float32, bfloat16 or float16.
    bits : {8, 4}
        Of a code. Those of 8 are -127 .. 127, those of 4 are -8 .. 7, kept as 0 .. 15.
    group : int or None
        How many neighbours along K share a scale: 32, 64 or a multiple of 128. None: a whole row.

    Returns
    -------
    QuantisedWeight
        Its scales have the dtype of `weight`.

    Raises
    ------
    ValueError
        `bits`, `group` or a weight that is not finite.

    Examples
    --------
    >>> import torch
    >>> from specattn.quantised import quantise
    >>> few = quantise(torch.randn(96, 128), bits=4)
    >>> few.codes.shape, few.scale.shape
    (torch.Size([96, 64]), torch.Size([96, 2]))
    """
    rows, depth = weight.shape
    size = depth if group is None else group
    if bits not in (8, 4):
        raise ValueError(f"bits: expected 8 or 4, got {bits!r}")
    if size < 1 or depth % size:
        raise ValueError(f"group: expected a divisor of K={depth}, got {group!r}")
    # On a CPU some rows at a time stay in a cache between what is done to them.
    at_once = _ROWS if weight.device.type == "cpu" else _ROWS_OF_GPU
    parts = [_rounded(some, bits, size) for some in weight.split(at_once)]
    codes, scale = (torch.cat(found) for found in zip(*parts, strict=True))
    return QuantisedWeight(codes, scale, None, depth)


def _rounded(weight: torch.Tensor, bits: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes as they are kept, and scales."""
    groups = weight.float().unflatten(1, (-1, size))
    least, most = (-127, 127) if bits == 8 else (-8, 7)
    # The weight of greatest magnitude becomes the code of greatest magnitude, which has a sign.
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    greatest = torch.where(-low > high, low, high)
    if not greatest.isfinite().all():
        raise ValueError("weight: expected finite numbers, got some that are not")
    scale = (greatest / least).to(weight.dtype).float()
    codes = (groups / scale).nan_to_num_(0, 0, 0).round_().clamp_(least, most)
    codes = codes.flatten(1).to(torch.int8)
    if bits == 4:
        codes = pack_nibbles(codes + 8)
    return codes, scale.squeeze(-1).to(weight.dtype)

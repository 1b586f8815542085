"""Weights of 8 and 4 bits in the layout that `linear_few_rows` reads, and how they are made.

Scales are rounded to bfloat16 before codes are: weights that a run has widened to float32 give the
codes that they give as they are stored.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from specattn.reference._codes import (
    TILE,
    dequantised,
    fits_tiles,
    in_rows,
    in_tiles,
    of_tiles,
    pack_nibbles,
    to_tiles,
    unpack_nibbles,
)

_ROWS, _ROWS_OF_GPU = 64, 2048  # rounded at once
_IN_KERNELS = (torch.float32, torch.bfloat16, torch.float16)
_MOST_FLOAT8 = torch.finfo(torch.float8_e4m3fn).max
_BY_TILES = ("avx512_bf16", "avx512")  # instruction sets that multiply faster with codes in tiles
NOT_FINITE = "weight: expected finite numbers, got some that are not"

Rounded = tuple[torch.Tensor, torch.Tensor]
"""Codes as they are kept, and scales."""

__all__ = ["QuantisedWeight", "pack_nibbles", "quantise", "quantise_float8", "unpack_nibbles"]


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """Weights ``(code - zero) * scale``, [N, K], as `specattn.linear_few_rows` takes them.

    `codes` are int8 or float8_e4m3fn [N, K], or of 4 bits and packed, uint8; `scale` and `zero`,
    which may be None, are [N, groups]. `depth` is K. In tiles (`laid`) all are other matrices of as
    many rows, which `in_rows` undoes.
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
        if self.tiled:
            return 32 * self.codes.shape[1] // self.depth
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def tiled(self) -> bool:
        """Whether codes, scales and zero points lie in tiles of sixteen rows."""
        return self.codes.dtype == torch.int32

    def laid(self) -> QuantisedWeight:
        """Return them as kernels of their device read them fastest.

        On a CPU integers lie in tiles where it multiplies faster so and the layer has whole ones,
        others with what groups have of a row side by side; elsewhere that of a group lies so.
        """
        on_cpu = self.scale.device.type == "cpu"
        few = self if on_cpu else self.in_rows()
        if few.tiled:
            return few
        whole = fits_tiles(len(few), few.depth) and not few.codes.is_floating_point()
        if on_cpu and whole and multiplies_tiles():
            zero = None if few.zero is None else in_tiles(few.zero)
            return QuantisedWeight(
                to_tiles(few.codes, few.depth), in_tiles(few.scale), zero, few.depth
            )

        def lay(x: torch.Tensor) -> torch.Tensor:
            return x.contiguous() if on_cpu else x.t().contiguous().t()

        zero = None if few.zero is None else lay(few.zero)
        return QuantisedWeight(few.codes, lay(few.scale), zero, few.depth)

    def in_rows(self) -> QuantisedWeight:
        """Return them with codes, scales and zero points in rows."""
        if not self.tiled:
            return self
        zero = None if self.zero is None else in_rows(self.zero)
        codes = of_tiles(self.codes, self.depth)
        return QuantisedWeight(codes, in_rows(self.scale), zero, self.depth)

    def split(self, sizes: Sequence[int]) -> list[QuantisedWeight]:
        """Return the same weights in parts of so many rows."""
        few = self.in_rows() if any(size % TILE for size in sizes) else self
        zeros = [None] * len(sizes) if few.zero is None else few.zero.split(list(sizes))
        parts = zip(few.codes.split(list(sizes)), few.scale.split(list(sizes)), zeros, strict=True)
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


def multiplies_tiles() -> bool:
    """Whether kernels of this processor multiply faster with codes in tiles."""
    if not find_spec("specattn._cpu"):
        return False
    isa: str = importlib.import_module("specattn._cpu").isa()
    return isa in _BY_TILES


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
        Its scales are bfloat16.

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
    return _by_rows(weight, lambda some: _rounded(some, bits, size))


def quantise_float8(weight: torch.Tensor) -> QuantisedWeight:
    """Round weights [N, K] to the nearest floats of 8 bits (e4m3), with a scale for each row.

    The greatest magnitude of a row becomes 448. Raises ValueError where a weight is not finite.
    """
    return _by_rows(weight, _rounded_float8)


def _by_rows(weight: torch.Tensor, rounded: Callable[[torch.Tensor], Rounded]) -> QuantisedWeight:
    """Return what rows become; on a CPU some at a time, which stay in a cache meanwhile."""
    at_once = _ROWS if weight.device.type == "cpu" else _ROWS_OF_GPU
    parts = [rounded(some) for some in weight.split(at_once)]
    # Copied as bytes: torch joins no floats of 8 bits on every device.
    kind = parts[0][0].dtype
    codes = torch.cat([codes.view(torch.uint8) for codes, _ in parts]).view(kind)
    return QuantisedWeight(codes, torch.cat([scale for _, scale in parts]), None, weight.shape[1])


def _rounded_float8(weight: torch.Tensor) -> Rounded:
    weight = weight.float()
    greatest = weight.abs().amax(-1, keepdim=True)
    if not greatest.isfinite().all():
        raise ValueError(NOT_FINITE)
    scale = (greatest / _MOST_FLOAT8).to(torch.bfloat16)
    codes = (weight / scale.float()).nan_to_num_(0, 0, 0).clamp_(-_MOST_FLOAT8, _MOST_FLOAT8)
    return codes.to(torch.float8_e4m3fn), scale


def _rounded(weight: torch.Tensor, bits: int, size: int) -> Rounded:
    """Return codes as they are kept, and scales."""
    groups = weight.float().unflatten(1, (-1, size))
    least, most = (-127, 127) if bits == 8 else (-8, 7)
    # The weight of greatest magnitude becomes the code of greatest magnitude, which has a sign.
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    greatest = torch.where(-low > high, low, high)
    if not greatest.isfinite().all():
        raise ValueError(NOT_FINITE)
    scale = (greatest / least).to(torch.bfloat16).float()
    codes = (groups / scale).nan_to_num_(0, 0, 0).round_().clamp_(least, most)
    codes = codes.flatten(1).to(torch.int8)
    if bits == 4:
        codes = pack_nibbles(codes + 8)
    return codes, scale.squeeze(-1).to(torch.bfloat16)

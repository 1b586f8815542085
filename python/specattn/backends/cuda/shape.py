"""The shape of a block of `decode`: the part of csrc/cuda/shape.cuh that a launch needs."""

from __future__ import annotations

from typing import NamedTuple

from ...call_forms import NotServed
from .build import Device

HEAD_DIMS = (64, 80, 96, 128, 256)
MOST_ROWS = 64
_RESERVED = 1024  # bytes of shared memory that the driver takes of every block
_STATIC = 4096  # bytes at most of a block's static shared memory


class Shape(NamedTuple):
    """A block: its rows and head dimension, stages of its pipeline, blocks that an SM holds."""

    rows: int
    head_dim: int
    stages: int
    blocks: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return 8 if self.rows == 64 and self.head_dim > 128 else 4

    @property
    def teams(self) -> int:
        """Groups of warps that have keys of their own."""
        rows_per_warp = 16 if self.rows == 16 or self.head_dim > 128 else 32
        return self.warps // (self.rows // rows_per_warp)

    @property
    def keys(self) -> int:
        """Keys of one team in one step."""
        return 32 if self.head_dim == 64 and self.rows == 16 else 16

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        pitch = 2 * self.head_dim + 16
        in_registers = self.rows == 16 and self.head_dim <= 128
        queries = 0 if in_registers else self.rows * pitch
        pipeline = self.teams * self.stages * 2 * self.keys * pitch
        return max(queries + pipeline, 4 * self.teams * self.rows * (self.head_dim + 2))


def shape_of(rows: int, head_dim: int, device: Device) -> Shape:
    """Return the block for so many rows: two on an SM if they fit, with the deepest pipeline."""
    padded = 16 if rows <= 16 else 32 if rows <= 32 else 64
    for blocks in (2, 1):
        most = device.shared_per_multiprocessor // blocks - _RESERVED
        most = min(most, device.shared_per_block) - _STATIC
        for stages in (4, 3, 2):
            shape = Shape(padded, head_dim, stages, blocks)
            if shape.shared <= most and shape.warps * blocks <= 8:
                return shape
    raise NotServed(f"D={head_dim} in {device.shared_per_block} bytes of shared memory")

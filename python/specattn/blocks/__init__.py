"""Blocks of models as functions of `ops`, and the ways to run one: torch, recorded, captured."""

from specattn.blocks.gated_delta import Convolution, Gates
from specattn.blocks.ops import (
    TORCH,
    Norm,
    Ops,
    Place,
    Projection,
    Rotated,
    Rotation,
    Store,
    Unrecognised,
    angle_tables,
    embedding_scale,
    norm_of,
    projection,
    rotate,
    swiglu,
    top_tokens,
)
from specattn.blocks.programs import Direct, Graph, Programs, captured, recorded

__all__ = [
    "TORCH",
    "Convolution",
    "Direct",
    "Gates",
    "Graph",
    "Norm",
    "Ops",
    "Place",
    "Programs",
    "Projection",
    "Rotated",
    "Rotation",
    "Store",
    "Unrecognised",
    "angle_tables",
    "captured",
    "embedding_scale",
    "norm_of",
    "projection",
    "recorded",
    "rotate",
    "swiglu",
    "top_tokens",
]

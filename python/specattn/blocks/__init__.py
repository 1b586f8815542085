"""Blocks of models as functions of `ops`, and the ways to run one: torch, recorded, captured."""

from specattn.blocks.cuda_graphs import Graph
from specattn.blocks.gated_delta import Convolution, Gates
from specattn.blocks.operands import (
    Drawing,
    Norm,
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
    whole,
)
from specattn.blocks.ops import TORCH, Ops, followed, rotate, swiglu, top_tokens
from specattn.blocks.programs import (
    Direct,
    Programs,
    Replayed,
    Size,
    captured,
    recorded,
)
from specattn.blocks.results import graph_bytes

__all__ = [
    "TORCH",
    "Convolution",
    "Direct",
    "Drawing",
    "Gates",
    "Graph",
    "Norm",
    "Ops",
    "Place",
    "Programs",
    "Projection",
    "Replayed",
    "Rotated",
    "Rotation",
    "Size",
    "Store",
    "Unrecognised",
    "angle_tables",
    "captured",
    "embedding_scale",
    "followed",
    "graph_bytes",
    "norm_of",
    "projection",
    "recorded",
    "rotate",
    "swiglu",
    "top_tokens",
    "whole",
]

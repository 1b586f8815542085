"""Who else computes this: every library that is here, on the same tensors, checked like ours.

A peer answers with a part of the primitive's outputs. Masks, plans and tables are made beforehand;
whatever a caller would have to do in every call (repeat the heads, copy pages or chosen tokens
together) is part of the peer's time.
"""

from __future__ import annotations

from types import ModuleType

import torch

from . import (
    composition,
    flash_attn,
    flashinfer,
    flex,
    llama_cpp,
    plain,
    sdpa,
    varlen,
    vllm,
    xformers,
)
from .plain import gathered, importance, linear, room_for, selection, writes
from .task import Attention, Peer

FAMILIES: dict[str, ModuleType] = {
    "sdpa": sdpa,
    "composition": composition,
    "flex": flex,
    "varlen": varlen,
    "flash-attn": flash_attn,
    "flashinfer": flashinfer,
    "xformers": xformers,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
}
# Who reads pages where they lie, or keeps a cache of its own.
_IN_PLACE = ("flash-attn", "flashinfer", "xformers", "vllm", "llama.cpp")
QUICK = tuple(name for name in FAMILIES if name != "flex")  # it compiles every shape anew

__all__ = [
    "FAMILIES",
    "QUICK",
    "Attention",
    "Peer",
    "attention",
    "gathered",
    "importance",
    "linear",
    "merge",
    "missing",
    "room_for",
    "selection",
    "verify",
    "writes",
]


def missing(device: torch.device, wanted: tuple[str, ...]) -> dict[str, str]:
    """Return every peer that takes no part in a run, and why."""
    reasons = {
        name: family.why_not(device) if name in wanted else "not asked for"
        for name, family in FAMILIES.items()
    }
    return {name: reason for name, reason in reasons.items() if reason}


def attention(task: Attention, wanted: tuple[str, ...]) -> dict[str, Peer]:
    """Return every wanted peer that computes this task here."""
    found: dict[str, Peer] = {}
    for name in wanted:
        family = FAMILIES[name]
        if not family.why_not(task.q.device):
            found |= family.attention(task)
    in_place = () if task.prefix is None else _IN_PLACE
    return {
        (name if name.startswith(in_place) else task.first + name): peer
        for name, peer in found.items()
    }


def verify(
    task: Attention, wanted: tuple[str, ...], collect: str, rows: tuple[int, ...], capacity: int
) -> dict[str, Peer]:
    """Return every wanted peer, followed by the product that collects."""
    return plain.verify(task, attention(task, wanted), collect, rows, capacity)


def merge(outs: torch.Tensor, lses: torch.Tensor) -> dict[str, Peer]:
    """Return plain torch, and FlashInfer where it is."""
    return plain.merge(outs, lses) | flashinfer.merge(outs, lses)

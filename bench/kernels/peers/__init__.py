"""Peers: every library here that computes a primitive, on the same tensors, checked like ours.

A peer answers with a part of the primitive's outputs. Masks, plans and tables are made beforehand;
whatever a caller would have to do in every call (repeat the heads, copy pages or chosen tokens
together) is part of the peer's time.
"""

from __future__ import annotations

from functools import partial

import torch

from specattn.flash_attention import MODULES

from . import gpu, llama_cpp, plain, torch_forms, vllm
from .task import Attention, Family, Peer, needs


def _always(device: torch.device) -> None:
    """Return None: torch is always here."""


FAMILIES = {
    "sdpa": Family(_always, torch_forms.sdpa),
    "composition": Family(_always, torch_forms.composition),
    "flex": Family(_always, torch_forms.flex),
    "varlen": Family(partial(needs, "torch.nn.attention.varlen"), gpu.varlen),
    **{
        name.replace(" ", "-"): Family(
            partial(needs, name), partial(gpu.flash_attn, name), in_place=True
        )
        for name in MODULES
    },
    "flashinfer": Family(partial(needs, "flashinfer"), gpu.flashinfer, in_place=True),
    "xformers": Family(partial(gpu.needs_one, gpu.XFORMERS[::-1]), gpu.xformers, in_place=True),
    "vllm": Family(vllm.why_not, vllm.attention, in_place=True),
    "llama.cpp": Family(llama_cpp.why_not, llama_cpp.attention, in_place=True),
}
QUICK = tuple(name for name in FAMILIES if name != "flex")  # it compiles every shape anew


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
    for family in (FAMILIES[name] for name in wanted):
        if not family.why_not(task.q.device):
            first = "" if family.in_place and task.prefix is not None else task.first
            found |= {first + name: peer for name, peer in family.attention(task).items()}
    return found


def verify(
    task: Attention, wanted: tuple[str, ...], collect: str, rows: tuple[int, ...], capacity: int
) -> dict[str, Peer]:
    """Return every wanted peer, followed by the product that collects."""
    return plain.verify(task, attention(task, wanted), collect, rows, capacity)


def merge(outs: torch.Tensor, lses: torch.Tensor) -> dict[str, Peer]:
    """Return plain torch, and FlashInfer where it is."""
    return plain.merge(outs, lses) | gpu.merge(outs, lses)

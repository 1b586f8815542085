"""FlexAttention, compiled; its block mask is made beforehand."""

from __future__ import annotations

import functools

import torch

from .task import Attention, Peer


def why_not(device: torch.device) -> None:
    """Return None: torch is always here."""


@functools.cache
def _compiled():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def attention(task: Attention) -> dict[str, Peer]:
    """Return one compiled call; every new shape costs half a minute of compilation on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask

    q, rows = task.q, task.q.shape[1]
    k = task.keys_and_values()[0]
    length, grouped = k.shape[1] - rows, q.shape[2] != k.shape[2]
    tree = task.tree_mask()

    def visible(b, h, row, key):
        return (key < length) | tree[row, (key - length).clamp(min=0)]

    mask = create_block_mask(visible, None, None, rows, length + rows, device=q.device)

    def compiled() -> dict[str, torch.Tensor]:
        k, v = (x.transpose(1, 2) for x in task.keys_and_values())
        out = _compiled()(q.transpose(1, 2), k, v, block_mask=mask, enable_gqa=grouped)
        return {"out": out.transpose(1, 2)}

    return {"flex attention": compiled}

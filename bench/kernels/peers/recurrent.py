"""Layers with a state in plain torch, as a caller writes them: products, a triangular solve."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize, silu

from specattn import Tree

from .task import Peer


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor,
) -> dict[str, Peer]:
    """Solve all rows at once, with differences of summed decays, in float32."""
    group = v.shape[2] // k.shape[2]

    def solved() -> dict[str, torch.Tensor]:
        mask = Tree(parents).mask
        keys, queries = (
            normalize(x.float(), dim=-1).repeat_interleave(group, 2).transpose(1, 2) for x in (k, q)
        )
        queries = queries * q.shape[-1] ** -0.5
        total = g.transpose(1, 2) @ mask.float().T
        decay = (total[..., None] - total[:, :, None]).masked_fill(~mask, -torch.inf).exp()
        rate, since = beta.transpose(1, 2)[..., None], total.exp()[..., None]
        system = rate * decay * (keys @ keys.mT)
        known = rate * (v.float().transpose(1, 2) - since * (keys @ state))
        d = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        out = since * (queries @ state) + decay * (queries @ keys.mT) @ d
        return {"out": out.transpose(1, 2).to(q.dtype)}

    return {"triangular solve": solved}


def gated_delta_commit(state: torch.Tensor, stash: torch.Tensor) -> dict[str, Peer]:
    """Commit all rows as one path, in place."""
    size = state.shape[-1]
    k, d, decay = stash.transpose(1, 2).split([size, size, 1], -1)

    def product() -> dict[str, torch.Tensor]:
        behind = decay[:, :, 1:].flip(2).cumprod(2).flip(2)
        behind = torch.cat([behind, torch.ones_like(decay[:, :, :1])], 2)
        state.mul_(decay.prod(2, keepdim=True)).add_((behind * k).mT @ d)
        return {"state": state}

    return {"torch operators": product}


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, kept: torch.Tensor, parents: torch.Tensor
) -> dict[str, Peer]:
    """Gather the ancestors of every row, then sum them up."""
    taps, rows = weight.shape[1], x.shape[1]

    def gathered() -> dict[str, torch.Tensor]:
        above = torch.cat([torch.arange(-1, taps - 2), parents.cpu() + taps - 1])
        places = [torch.arange(rows) + taps - 1]
        for _ in range(taps - 1):
            places.insert(0, above[places[0]])
        seen = torch.cat([kept, x], 1)[:, torch.stack(places, 1).to(x.device)]
        return {"out": silu((seen.float() * weight.float().T).sum(2)).to(x.dtype)}

    return {"torch operators": gathered}

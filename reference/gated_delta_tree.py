"""The gated delta rule over a tree of tokens, from one state that is only read.

Along a path a state S [Dk, Dv] of a head becomes, with a = exp(g),

    S <- a S;   d = beta (v - S^T k);   S <- S + k d^T;   out = S^T q

so what a node's state says to a vector x follows from the state in front of the tree and from the
updates (k_j, d_j) of the nodes on its path, each decayed by what follows it:

    S_i^T x = S_0^T (A_i x) + sum over j on the path of (x . A_ij k_j) d_j

A_i is the product of a along the path, A_ij that of the nodes behind j. Every d_i is made of those
of its ancestors: a triangular system, solved in the order of the nodes (arXiv 2412.06464, section
3.3, has it for chains). No product is divided by another, so decays of any strength are exact.
"""

import torch

from ._attention import accumulation_dtype
from ._ragged import by_request


@by_request
def gated_delta_tree(
    q,
    k,
    v,
    g,
    beta,
    state,
    parents=None,
    query_scale=None,
    l2_norm=False,
    cu_seqlens_q=None,
    max_seqlen_q=None,
):
    """Return `(out [B, T, Hv, Dv], stash [B, T, Hv, Dk + Dv + decays])`; `state` is left alone.

    q, k [B, T, Hk, Dk]; v [B, T, Hv, Dv]; g [B, T, Hv], or [B, T, Hv, Dk] per channel; beta
    [B, T, Hv]; state [B, Hv, Dk, Dv]; parents [B or 1, T], -1 behind the state, None a chain. The
    stash of a node is its key, d and exp(g). `cu_seqlens_q` makes rows ragged, as `by_request`
    says.
    """
    given, dtype = q.dtype, accumulation_dtype(q.dtype)
    heads, rows = v.shape[2], q.shape[1]
    query_scale = q.shape[-1] ** -0.5 if query_scale is None else query_scale
    q, k = (_of_value_heads(x.to(dtype), heads, l2_norm) for x in (q, k))
    q, k, v = q.mul(query_scale).transpose(1, 2), k.transpose(1, 2), v.to(dtype).transpose(1, 2)
    decay = (g if g.dim() == 4 else g[..., None]).exp().transpose(1, 2)  # [B, Hv, T, decays]
    beta, batch = beta.transpose(1, 2)[..., None], torch.arange(len(q), device=q.device)
    if parents is None:
        parents = torch.arange(-1, rows - 1, device=q.device)[None]
    parents = parents.expand(len(q), -1)

    # Per node, what its children begin with; the last, which is parent -1, is the state's.
    since = decay.new_ones(rows + 1, *decay.shape[:2], decay.shape[-1])
    behind = decay.new_zeros(rows + 1, *decay.shape)
    on_path = torch.zeros(rows + 1, len(q), rows, dtype=torch.bool, device=q.device)
    d, out = torch.zeros_like(v), torch.empty_like(v)
    for i in range(rows):
        above = parents[:, i], batch
        since[i] = since[above] * decay[:, :, i]
        behind[i] = behind[above] * decay[:, :, i, None]
        on_path[i] = on_path[above]
        known = _read(k[:, :, i], state, since[i], behind[i], k, d, on_path[i])
        d[:, :, i] = beta[:, :, i] * (v[:, :, i] - known)
        behind[i, :, :, i] = 1
        on_path[i, :, i] = True
        out[:, :, i] = _read(q[:, :, i], state, since[i], behind[i], k, d, on_path[i])
    stash = torch.cat([k, d, decay], -1).transpose(1, 2)
    return out.transpose(1, 2).to(given), stash


def _of_value_heads(x, heads, l2_norm):
    """Return q or k, normalised where asked for, repeated for the value heads that share them."""
    if l2_norm:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return x.repeat_interleave(heads // x.shape[2], 2)


def _read(x, state, since, behind, k, d, on_path):
    """Return S_i^T x [B, Hv, Dv]; nodes that are not on the path may be NaN."""
    hidden = ~on_path[:, None, :, None]
    weights = (x[:, :, None] * behind * k).masked_fill(hidden, 0).sum(-1, keepdim=True)
    updates = (weights * d.masked_fill(hidden, 0)).sum(2)
    return ((x * since)[:, :, None] @ state)[:, :, 0] + updates

"""The state behind accepted tokens, from what verification left."""

from itertools import pairwise

import torch


def gated_delta_commit(state, stash, nodes, counts, cu_seqlens_q=None, max_seqlen_q=None):
    """Advance `state` [B, Hv, Dk, Dv] in place along the first `counts` [B] of `nodes` [B, P].

    They are a path from the state downwards; None names the first rows. `stash` is that of
    `gated_delta_tree`; with `cu_seqlens_q` its rows are ragged.
    """
    starts = None if cu_seqlens_q is None else list(pairwise(cu_seqlens_q.tolist()))
    for index, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        rows = stash[index] if starts is None else stash[slice(*starts[index])]
        path = slice(count) if nodes is None else nodes[index, :count]
        k, d, decay = split_stash(rows[path].transpose(0, 1), state)
        # The product of the decays behind each node of the path, then of all.
        behind = torch.cat([decay[:, 1:], torch.ones_like(decay[:, :1])], 1)
        behind = behind.flip(1).cumprod(1).flip(1)
        whole = (behind[:, 0] * decay[:, 0])[..., None]
        state[index] = whole * state[index] + (behind * k).mT @ d


def split_stash(stash, state):
    """Return `(k, d, decay)` of a stash [.., Dk + Dv + decays], by the sizes of a state."""
    k_dim, v_dim = state.shape[-2:]
    return stash.split([k_dim, v_dim, stash.shape[-1] - k_dim - v_dim], -1)

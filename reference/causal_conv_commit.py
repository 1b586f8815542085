"""The inputs that a short convolution keeps, behind accepted tokens."""

from itertools import pairwise

import torch


def causal_conv_commit(conv_state, x, nodes, counts, cu_seqlens_q=None, max_seqlen_q=None):
    """Move `conv_state` [B, K - 1, C] in place along the first `counts` [B] of `nodes` [B, P].

    They are a path from the state downwards; None names the first rows. `x` is what
    `causal_conv_tree` was given; with `cu_seqlens_q` its rows are ragged.
    """
    starts = None if cu_seqlens_q is None else list(pairwise(cu_seqlens_q.tolist()))
    for index, count in enumerate(counts.tolist()):
        rows = x[index] if starts is None else x[slice(*starts[index])]
        path = slice(count) if nodes is None else nodes[index, :count]
        seen = torch.cat([conv_state[index], rows[path]])
        conv_state[index] = seen[len(seen) - conv_state.shape[1] :]

"""The gated delta rule over a drafted tree, from one state per request that is only read."""

from __future__ import annotations

from typing import Any

import torch

from ._check import check_option, check_tensors
from ._library import call, define
from ._options import flag, number
from ._ragged import ragged_rows
from ._specs import accumulation_dtype
from .cost import Cost

MOST_ROWS = 128
_operator = define(
    "gated_delta_tree(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, "
    "Tensor? parents, float query_scale, bool l2_norm, Tensor? cu_seqlens_q, SymInt? max_seqlen_q, "
    "Tensor(a!) out, Tensor(b!) stash)"
)


def gated_delta_tree(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor | None = None,
    *,
    query_scale: float | None = None,
    l2_norm: bool = False,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    out: torch.Tensor | None = None,
    stash: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify a tree of tokens in a layer that keeps a state instead of keys (Gated DeltaNet, KDA).

    A token turns a head's state S [Dk, Dv] into ``exp(g) S + k d^T`` with
    ``d = beta (v - exp(g) S^T k)``, and says ``S^T q`` of the new one (arXiv 2412.06464, equation
    10; 2510.26692 has `g` per channel). A rejected token cannot be taken out of a state again. So
    all nodes are computed from the state in front of the tree, which is read once and stays as it
    is, and `gated_delta_commit` makes the state behind any node of what is stashed here: Dk + Dv +
    1 numbers per token and head, where a copy of the state would be Dk * Dv.

    Parameters
    ----------
    q, k : Tensor [B, T, Hk, Dk]
        float32, bfloat16 or float16; float64 on the reference. T up to 128; longer texts are chunks
        with a commit behind each. Dk and Dv are multiples of 8 up to 256.
    v : Tensor [B, T, Hv, Dv]
        Hv a multiple of Hk: value heads in groups of Hv / Hk share a head of `q` and `k`.
    g : Tensor [B, T, Hv] or [B, T, Hv, Dk], float32
        Logarithm of the decay, at most 0; of a head, or of each channel of its keys.
    beta : Tensor [B, T, Hv], float32
        How much of what the state knows of `k` is replaced, 0 to 1.
    state : Tensor [B, Hv, Dk, Dv], float32
        Read, never written.
    parents : Tensor [T], [1, T] or [B, T], int64, optional
        Each node's parent, which comes before it, or -1 behind the state: `Tree.parents`. None is a
        chain. What lies in a row touches its descendants alone, so padding may be NaN where nothing
        follows it.
    query_scale : float, optional
        Factor of `q`; Dk**-0.5 by default.
    l2_norm : bool
        Divide `q` and `k` by their lengths first, the root of the sum of squares + 1e-6.
    cu_seqlens_q : Tensor [B + 1], int32, optional
        Makes rows ragged, as `hybrid_tree_attention` says: [tokens, ..] instead of [B, T, ..], and
        `parents` [tokens], which count the rows of their own request.
    max_seqlen_q : int, optional
        Rows that no request exceeds, at most 128; needed with `cu_seqlens_q`.
    out : Tensor [B, T, Hv, Dv], optional
        Written in place and returned; dtype as `q`.
    stash : Tensor [B, T, Hv, Dk + Dv + 1], or [.., Dk + Dv + Dk] with `g` per channel, optional
        Written in place and returned; float32.

    Returns
    -------
    out : Tensor [B, T, Hv, Dv]
    stash : Tensor [B, T, Hv, Dk + Dv + 1] or [B, T, Hv, Dk + Dv + Dk]
        What `gated_delta_commit` needs: every node's key, update and decay.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device, stride or value; the message names it.
    IndexError
        A parent does not come before its child, or `cu_seqlens_q` does not deal all rows. On a GPU
        only with ``SPECATTN_CHECK=1``, because looking would wait for the device.

    Examples
    --------
    Verify a tree, then let the root and its second child become part of the state:

    >>> import torch, specattn
    >>> tree = specattn.Tree([-1, 0, 0])
    >>> q, k, v = torch.randn(1, 3, 2, 16), torch.randn(1, 3, 2, 16), torch.randn(1, 3, 4, 32)
    >>> g, beta = -torch.rand(1, 3, 4), torch.rand(1, 3, 4)
    >>> state = torch.zeros(1, 4, 16, 32)
    >>> out, stash = specattn.gated_delta_tree(
    ...     q, k, v, g, beta, state, tree.parents, l2_norm=True
    ... )
    >>> specattn.gated_delta_commit(state, stash, torch.tensor([[0, 2]]), torch.tensor([2]))
    >>> out.shape, stash.shape, bool(state.any())
    (torch.Size([1, 3, 4, 32]), torch.Size([1, 3, 4, 49]), True)
    """
    ragged = ragged_rows(cu_seqlens_q, max_seqlen_q)
    tensors: dict[str, Any] = {"k": k, "v": v, "g": g, "beta": beta, "state": state}
    tensors |= {"parents": parents, "out": out}
    if stash is not None:
        tensors["stash"] = stash
    sizes = check_tensors(q=q, **ragged, **tensors)
    check_gated_sizes(sizes)
    query_scale = number("query_scale", query_scale)
    k_dim, v_dim = sizes["Dk"], sizes["Dv"]
    width = k_dim + v_dim + (k_dim if g.dim() == v.dim() else 1)
    if out is None:
        out = q.new_empty(v.shape)
    if stash is None:
        stash = q.new_empty((*v.shape[:-1], width), dtype=accumulation_dtype(q.dtype))
    check_option("stash.shape", [*stash.shape], stash.shape[-1] == width, f"{width} numbers")
    if parents is not None and cu_seqlens_q is None and parents.dim() == 1:
        parents = parents[None]
    query_scale = k_dim**-0.5 if query_scale is None else query_scale
    inputs = (q, k, v, g, beta, state, parents, query_scale, flag("l2_norm", l2_norm))
    call(
        _operator,
        sizes,
        *inputs,
        ragged.get("cu_seqlens_q"),
        ragged.get("max_seqlen_q"),
        out,
        stash,
    )
    return out, stash


def check_gated_sizes(sizes: dict[str, int]) -> None:
    """Check what the shapes of a layer with a state must be beside each other."""
    for name, symbol in (("state", "Dk"), ("state", "Dv")):
        n = sizes[symbol]
        holds = n % 8 == 0 and n <= 256
        check_option(f"{name}: {symbol}", n, holds, "a multiple of 8 up to 256")
    if "Hk" in sizes:
        expected = f"heads in multiples of Hk={sizes['Hk']}"
        check_option("v", sizes["Hv"], sizes["Hv"] % sizes["Hk"] == 0, expected)
    check_option("q", sizes["T"], sizes["T"] <= MOST_ROWS, f"at most {MOST_ROWS} rows")


def cost(v: torch.Tensor, state: torch.Tensor, heads: int) -> Cost:
    """Count rows, gates and the state in, outputs and the stash out, without normalising.

    `v` is [B, T, Hv, Dv], `heads` are those of the keys, and `g` is of a head.
    """
    (B, T, Hv, Dv), Dk, e = v.shape, state.shape[2], v.element_size()
    rows, pairs = B * T * Hv, B * Hv * T * (T + 1) // 2
    read = B * T * (2 * heads * Dk + Hv * Dv) * e + 8 * rows + 4 * state.numel()
    written = rows * (Dv * e + 4 * (Dk + Dv + 1))
    return Cost(read, written, 4 * rows * Dk * Dv + 4 * pairs * (Dk + Dv))

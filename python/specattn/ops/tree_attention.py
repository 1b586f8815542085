"""Attention of tree nodes to each other."""

from __future__ import annotations

import torch

from ._check import check_tensors
from ._library import STATE, call, define
from ._options import number
from ._outputs import state_like
from ._tree_mask import packed_mask
from .cost import Cost, Sizes

_operator = define(
    "tree_attention(Tensor q, Tensor k_new, Tensor v_new, Tensor? tree_mask, "
    f"float softmax_scale, float softcap, {STATE})"
)


def tree_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    tree_mask: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from tree nodes to the nodes that each may see.

    The tree half of LongSpec's hybrid attention (arXiv 2502.17421, section 3.3), for callers who
    compute the cached half with a kernel of their own and join the two with `merge_state`.

    Parameters
    ----------
    q : Tensor [B, T, Hq, D]
        float32, bfloat16 or float16; float64 on the reference. D is a multiple of 8 up to 576.
    k_new, v_new : Tensor [B, S, Hk, D] and [B, S, Hk, Dv]
        Keys and values of the tree, dtype as `q`; S >= T, Hq a multiple of Hk, Dv a multiple of 8
        up to 512. Values may be a view of the keys.
    tree_mask : Tensor or None
        Which keys a row sees: bool [T, S] or [B, T, S], or packed int64 [T, W] or [B, T, W] with
        W = ceil(S / 64), bit j of word w being key 64w + j. None is a causal chain: row t sees the
        keys j <= t + S - T. A key that a row does not see adds nothing to it, be it or its value
        NaN or infinite. A bool mask is packed on every call; `Tree.packed_mask` and
        `specattn.reference.pack_tree_mask` pack it once.
    softmax_scale : float, optional
        Factor of the logits; D**-0.5 by default.
    softcap : float
        If positive, logits become ``softcap * tanh(logits / softcap)``.
    out : Tensor [B, T, Hq, Dv], optional
        Written in place and returned; dtype as `q`.
    lse : Tensor [B, T, Hq], optional
        Written in place and returned; float32.

    Returns
    -------
    out : Tensor [B, T, Hq, Dv]
        0 for a row that sees no key.
    lse : Tensor [B, T, Hq]
        Natural log of the sum of the exponentiated logits; -inf for a row that sees no key.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type, dtype, shape, device, stride or value; the message names it.

    Examples
    --------
    Two drafts that share their first token:

    >>> import torch, specattn
    >>> tree = specattn.Tree([-1, 0, 0])
    >>> q, k, v = torch.randn(3, 1, 3, 8, 64).unbind()
    >>> out, lse = specattn.tree_attention(q, k, v, tree.mask)
    >>> out.shape, lse.shape
    (torch.Size([1, 3, 8, 64]), torch.Size([1, 3, 8]))
    """
    sizes = check_tensors(q=q, k_new=k_new, v_new=v_new, out=out, lse=lse, tree_mask=tree_mask)
    softcap, softmax_scale = number("softcap", softcap), number("softmax_scale", softmax_scale)
    mask, _ = packed_mask(tree_mask, sizes, None, q.device)
    scale = sizes["D"] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = state_like(q, sizes["Dv"], out, lse)
    call(_operator, sizes, q, k_new, v_new, mask, scale, softcap, out, lse)
    return out, lse


def cost(s: Sizes) -> Cost:
    """Count q, the tree's keys and values and its mask; two products per visible pair."""
    return Cost(
        read=s.queries + s.keys_and_values(s.S) + 8 * s.mask_words,
        written=s.state,
        operations=s.products(s.B * s.Hq * s.tree_pairs),
    )

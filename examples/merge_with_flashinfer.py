"""FlashInfer attends to the prefix, specattn to the drafted tree, `merge_state` joins the two.

For an engine that keeps its own kernel for the cache: the tree half is one call more, and no mask
over the whole context is needed. **Not run on a GPU**: written from FlashInfer's documentation.
"""

import importlib.util

import torch

import specattn

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def verify(q, k_prefix, v_prefix, k_tree, v_tree, tree):
    """Attend from the T nodes of a tree to a prefix and to the tree, for one request.

    FlashInfer has no batch dimension here, [T, Hq, D] and [L, Hk, D], and a log-sum-exp to base 2,
    [T, Hq]; specattn has [B, T, Hq, D], [B, T, Hk, D] and a natural one, [B, T, Hq].
    """
    import flashinfer

    out, lse = flashinfer.single_prefill_with_kv_cache(
        q, k_prefix, v_prefix, causal=False, kv_layout="NHD", return_lse=True
    )
    prefix = out[None], specattn.ops.lse_from_log2(lse)[None]
    nodes = specattn.tree_attention(q[None], k_tree[None], v_tree[None], tree.packed_mask)
    return specattn.merge_state(*prefix, *nodes)


def why_not():
    """Return what is missing here, or None."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed"
    return None if torch.cuda.is_available() else "FlashInfer needs a CUDA device"


def main(device="cuda", dtype=torch.bfloat16):
    """Compare the joined result with `hybrid_tree_attention`, which does both in one pass."""
    missing = why_not()
    if missing:
        print(f"nothing was run: {missing}")
        return
    torch.manual_seed(0)
    tree = specattn.Tree.full([2, 2]).to(device)

    def random(tokens, heads):
        return torch.randn(tokens, heads, HEAD_DIM, dtype=dtype, device=device)

    q = random(tree.size, Q_HEADS)
    k_prefix, v_prefix = random(1000, KV_HEADS), random(1000, KV_HEADS)
    k_tree, v_tree = random(tree.size, KV_HEADS), random(tree.size, KV_HEADS)
    out, lse = verify(q, k_prefix, v_prefix, k_tree, v_tree, tree)

    length = torch.tensor([1000], dtype=torch.int32, device=device)
    cache, nodes = (k_prefix[None], v_prefix[None]), (k_tree[None], v_tree[None])
    expected, expected_lse = specattn.hybrid_tree_attention(
        q[None], *cache, length, *nodes, tree.packed_mask
    )
    error = ((out - expected).float().norm() / expected.float().norm()).item()
    lse_error = (lse - expected_lse).abs().max().item()
    print(f"relative difference from one pass: {error:.1e}; of the log-sum-exp: {lse_error:.1e}")


if __name__ == "__main__":
    main()

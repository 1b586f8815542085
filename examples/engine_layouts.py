"""Caches as vLLM and SGLang lay them out, written and read where they lie.

A primitive takes keys and values as [pages, page_size, Hk, D] with any strides but the last, which
is 1. So a layout is a view: no copy, whatever is between a page's tokens, heads, layers and sides.
"""

import torch

import specattn

PAGES, PAGE, Q_HEADS, HEADS, D, LATENT, ROPE = 12, 16, 8, 2, 64, 512, 64
VIEWS = {
    "older vLLM, FlashAttention [2, pages, page, Hk, D]": (
        torch.zeros(2, PAGES, PAGE, HEADS, D),
        lambda cache: cache.unbind(0),
    ),
    "older vLLM, FlashInfer [pages, 2, page, Hk, D]": (
        torch.zeros(PAGES, 2, PAGE, HEADS, D),
        lambda cache: cache.unbind(1),
    ),
    "the same, HND [pages, 2, Hk, page, D]": (
        torch.zeros(PAGES, 2, HEADS, PAGE, D),
        lambda cache: cache.transpose(2, 3).unbind(1),
    ),
    "vLLM 0.32 [pages, Hk, page, 2 D], in any order": (
        torch.zeros(PAGES, PAGE, HEADS, 2 * D).transpose(1, 2),
        lambda cache: cache.transpose(1, 2).split(D, -1),
    ),
    "SGLang, two pools [tokens, Hk, D]": (
        torch.zeros(2, PAGES * PAGE, HEADS, D),
        lambda pools: [pool.view(-1, PAGE, HEADS, D) for pool in pools],
    ),
    "fp8 of either, one scale for a layer": (
        torch.zeros(PAGES, 2, PAGE, HEADS, D, dtype=torch.uint8),
        lambda cache: cache.view(torch.float8_e4m3fn).unbind(1),
    ),
    "MLA of either [pages, page, 576]": (
        torch.zeros(PAGES, PAGE, LATENT + ROPE),
        lambda cache: (cache[:, :, None], cache[:, :, None, :LATENT]),
    ),
}


def difference(cache, view):
    """Store two texts through a view of an engine's cache, and verify a chain of 4 behind them."""
    k_pages, v_pages = view(cache)
    assert k_pages.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    eight_bits, shared = k_pages.dtype == torch.float8_e4m3fn, v_pages.shape[-1] == LATENT
    scales = {"k_scale": 0.05, "v_scale": torch.tensor(0.05)} if eight_bits else {}
    lengths, rows = torch.tensor([70, 33], dtype=torch.int32), 4
    block_table = torch.randperm(PAGES).view(2, -1).int()
    k = torch.randn(2, PAGES // 2 * PAGE, *k_pages.shape[2:])
    v = k[..., :LATENT] if shared else torch.randn_like(k)
    slots = (block_table[..., None] * PAGE + torch.arange(PAGE)).flatten(1)
    written = (k, None, k_pages, None) if shared else (k, v, k_pages, v_pages)
    specattn.write_kv(*written, slots, **scales)

    q = torch.randn(2, rows, Q_HEADS, k.shape[-1])
    out, _ = specattn.hybrid_tree_attention(
        q, k_pages, v_pages, lengths, None, None, block_table=block_table, **scales
    )
    contiguous, _ = specattn.hybrid_tree_attention(q, k, v, lengths, None, None)
    return (out - contiguous).abs().max()


def main():
    """Attend over every layout, and say how far it is from the same over contiguous keys."""
    torch.manual_seed(0)
    for name, (cache, view) in VIEWS.items():
        print(f"{name:52} {difference(cache, view):.0e}")


if __name__ == "__main__":
    main()

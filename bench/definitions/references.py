"""What the definitions mean: their references, which need torch alone, and our solutions.

flashinfer-bench takes both as source text, so each stands by itself.
"""

ATTEND = '''
import math

import torch


def attend(q, k, v, visible, sm_scale):
    """[rows, Hq, D], [keys, Hk, D] twice, bool [rows, keys] or [Hk, rows, keys]: outputs, log2."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * sm_scale
    seen = visible if visible.dim() == 2 else visible.repeat_interleave(group, 0)
    logits = logits.masked_fill(~seen, -math.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), (lse / math.log(2)).T


def bits(packed, count):
    """Packed int64 [rows, words] as bool [rows, count]."""
    at = torch.arange(count, device=packed.device)
    return (packed[:, at // 64] >> at % 64 & 1).bool()
'''

TREE_VERIFY = (
    ATTEND
    + """

def run(q, k_cache, v_cache, qo_indptr, block_table, cache_seqlens, tree_mask, sm_scale):
    output, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, device=q.device)
    for b in range(len(cache_seqlens)):
        first, stop = int(qo_indptr[b]), int(qo_indptr[b + 1])
        rows, prefix = stop - first, int(cache_seqlens[b])
        k, v = (x[block_table[b].long()].flatten(0, 1)[: prefix + rows] for x in (k_cache, v_cache))
        tree = bits(tree_mask[first:stop], rows)
        visible = torch.cat([tree.new_ones(rows, prefix), tree], 1)
        result = attend(q[first:stop], k, v, visible, sm_scale)
        output[first:stop], lse[first:stop] = result[0].to(q.dtype), result[1]
    return output, lse
"""
)

VERIFY_SCORES = (
    ATTEND
    + """

def run(q, k_cache, v_cache, block_table, cache_seqlens, tree_mask, sm_scale):
    batch, count, heads = q.shape[:3]
    kv_heads, page_size = k_cache.shape[2], k_cache.shape[1]
    output = torch.zeros_like(q)
    lse = torch.full((batch, count, heads), -math.inf, device=q.device)
    capacity = block_table.shape[1] * page_size
    scores = torch.zeros(batch, kv_heads, capacity, device=q.device)
    for b in range(batch):
        prefix = int(cache_seqlens[b])
        pages, keys = block_table[b].long(), prefix + count
        k, v = (x[pages].flatten(0, 1)[:keys] for x in (k_cache, v_cache))
        tree = bits(tree_mask[b], count)
        visible = torch.cat([tree.new_ones(count, prefix), tree], 1)
        result = attend(q[b], k, v, visible, sm_scale)
        output[b], lse[b] = result[0].to(q.dtype), result[1]
        mean = q[b, [0, -1]].float().view(2, kv_heads, -1, q.shape[-1]).mean((0, 2))
        scores[b, :, :prefix] = torch.einsum("hd,khd->hk", mean, k[:prefix].float()) * sm_scale
    return output, lse, scores.view(batch, kv_heads, -1, page_size)
"""
)

SPARSE_GATHER = (
    ATTEND
    + """

def run(q, k_cache, v_cache, block_table, indices, index_lengths, k_new, v_new, sm_scale):
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -math.inf, device=q.device)
    count = q.shape[1]
    for b in range(len(q)):
        k, v = (x[block_table[b].long()].flatten(0, 1) for x in (k_cache, v_cache))
        selected = torch.zeros(k.shape[1], len(k), dtype=torch.bool, device=q.device)
        for h in range(k.shape[1]):
            selected[h, indices[b, h, : int(index_lengths[b, h])].long()] = True
        own = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()
        visible = torch.cat(
            [selected[:, None].expand(-1, count, -1), own.expand(k.shape[1], -1, -1)], 2
        )
        k, v = torch.cat([k, k_new[b]]), torch.cat([v, v_new[b]])
        unused = ~visible.any(0).any(0)
        result = attend(q[b], k.masked_fill(unused[:, None, None], 0),
                        v.masked_fill(unused[:, None, None], 0), visible, sm_scale)
        output[b], lse[b] = result[0].to(q.dtype), result[1]
    return output, lse
"""
)

OURS = {
    "tree_verify_paged": """
import specattn


def run(q, k_cache, v_cache, qo_indptr, block_table, cache_seqlens, tree_mask, sm_scale):
    out, lse = specattn.hybrid_tree_attention(
        q, k_cache, v_cache, cache_seqlens, None, None, tree_mask, block_table=block_table,
        softmax_scale=sm_scale, cu_seqlens_q=qo_indptr, max_seqlen_q=64 * tree_mask.shape[1],
    )
    return out, specattn.lse_to_log2(lse)
""",
    "verify_scores": """
import specattn


def run(q, k_cache, v_cache, block_table, cache_seqlens, tree_mask, sm_scale):
    out, lse, scores = specattn.verify_attention(
        q, k_cache, v_cache, cache_seqlens, None, None, tree_mask, block_table=block_table,
        softmax_scale=sm_scale, collect="scores", collect_rows=(0, -1),
    )
    shape = (len(q), k_cache.shape[2], -1, k_cache.shape[1])
    return out, specattn.lse_to_log2(lse), scores.nan_to_num_(neginf=0.0).view(shape)
""",
    "sparse_gather_paged": """
import specattn


def run(q, k_cache, v_cache, block_table, indices, index_lengths, k_new, v_new, sm_scale):
    out, lse = specattn.sparse_gather_attention(
        q, k_cache, v_cache, indices, index_lengths, k_new, v_new, block_table=block_table,
        softmax_scale=sm_scale,
    )
    return out, specattn.lse_to_log2(lse)
""",
}

# FlashInfer takes a mask over all keys, so that of the tree is put behind ones first: part of what
# its user pays. Not run: it needs a GPU.
FLASHINFER = """
import flashinfer
import torch


def run(q, k_cache, v_cache, qo_indptr, block_table, cache_seqlens, tree_mask, sm_scale):
    page_size, rows = k_cache.shape[1], qo_indptr.diff().tolist()
    keys = (cache_seqlens + qo_indptr.diff()).tolist()
    pages = [-(-n // page_size) for n in keys]
    at = torch.arange(max(rows), device=q.device)
    seen = (tree_mask[:, at // 64] >> at % 64 & 1).bool()
    parts = [
        torch.cat([part.new_ones(row, key - row), part[:, :row]], 1).flatten()
        for part, row, key in zip(seen.split(rows), rows, keys)
    ]
    used = torch.cat([table[:count] for table, count in zip(block_table, pages)])
    starts = torch.tensor([0, *pages], device=q.device).cumsum(0).int()
    last = torch.tensor([(n - 1) % page_size + 1 for n in keys], device=q.device).int()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(1 << 28, dtype=torch.uint8, device=q.device)
    )
    wrapper.plan(
        qo_indptr, starts, used, last, q.shape[1], k_cache.shape[2], q.shape[2], page_size,
        custom_mask=torch.cat(parts), sm_scale=sm_scale, q_data_type=q.dtype,
    )
    return wrapper.run(q, (k_cache, v_cache), return_lse=True)
"""

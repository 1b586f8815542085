"""What other libraries mean by their arguments, as dense attention, is what ours compute."""

import math

import pytest
import torch

import specattn
from specattn.integrations.conventions import from_flash_attention, from_flashinfer
from specattn.ops import lse_heads_first, lse_to_log2

ROWS, KEYS = [3, 1, 4], [10, 9, 4]  # of three requests; keys count a request's own rows
PAGE, HEADS, KV_HEADS, DIM = 4, 4, 2, 16


def pages():
    """Return caches, each request's pages and the queries, in float64 but exact in float32."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(ROWS), HEADS, DIM, generator=generator)
    k, v = torch.randn(2, 9, PAGE, KV_HEADS, DIM, generator=generator)
    order = iter(torch.randperm(9, generator=generator).tolist())
    return q, k, v, [[next(order) for _ in range(-(-n // PAGE))] for n in KEYS]


def dense(q, k, v, own, visible, scale=DIM**-0.5, softcap=0.0, sinks=None):
    """Return outputs and natural LSE of requests whose rows see `visible` [rows, keys]."""
    outs, lses, first = [], [], 0
    for rows, keys, listed, seen in zip(ROWS, KEYS, own, visible, strict=True):
        k_, v_ = (
            x[listed].flatten(0, 1)[:keys].repeat_interleave(HEADS // KV_HEADS, 1).double()
            for x in (k, v)
        )
        logits = torch.einsum("qhd,khd->hqk", q[first : first + rows].double(), k_) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~seen, -math.inf)
        lse = logits.logsumexp(-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.double()[:, None])
        outs.append(torch.einsum("hqk,khd->qhd", (logits - lse[..., None]).exp(), v_))
        lses.append(lse.T)
        first += rows
    return torch.cat(outs).float(), torch.cat(lses).float()


def causal(window=None):
    """Return which keys the last `rows` of `keys` tokens see."""
    seen = []
    for rows, keys in zip(ROWS, KEYS, strict=True):
        at = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
        seen.append((at >= 0) & (at < (window or keys)))
    return seen


def flashinfer_pages(own):
    starts = torch.tensor([0, *ROWS]).cumsum(0).int()
    pages_of = torch.tensor([0, *(len(x) for x in own)]).cumsum(0).int()
    last = torch.tensor([(n - 1) % PAGE + 1 for n in KEYS], dtype=torch.int32)
    return starts, pages_of, torch.tensor(sum(own, []), dtype=torch.int32), last, PAGE


def test_flashinfer_with_a_custom_mask():
    q, k, v, own = pages()
    generator = torch.Generator().manual_seed(1)
    visible = causal()
    for seen, rows in zip(visible, ROWS, strict=True):  # a tree: some rows do not see each other
        seen[:, -rows:] &= torch.rand(rows, rows, generator=generator) < 0.6
        seen[:, -rows:] |= torch.eye(rows, dtype=torch.bool)
    mask = torch.cat([seen.flatten() for seen in visible])
    given = from_flashinfer(*flashinfer_pages(own), custom_mask=mask, sm_scale=0.3)
    out, lse = specattn.hybrid_tree_attention(q, k, v, **given)
    expected, expected_lse = dense(q, k, v, own, visible, scale=0.3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse_to_log2(lse), expected_lse / math.log(2))


@pytest.mark.parametrize("window_left", [-1, 2])
def test_flashinfer_causal(window_left):
    q, k, v, own = pages()
    options = {"causal": True, "window_left": window_left, "logits_soft_cap": 2.0}
    given = from_flashinfer(*flashinfer_pages(own), **options)
    out, _ = specattn.hybrid_tree_attention(q, k, v, **given)
    window = None if window_left < 0 else window_left + 1
    torch.testing.assert_close(out, dense(q, k, v, own, causal(window), softcap=2.0)[0])


def test_flashinfer_without_causality():
    q, k, v, own = pages()
    out, _ = specattn.hybrid_tree_attention(q, k, v, **from_flashinfer(*flashinfer_pages(own)))
    everything = [torch.ones_like(seen) for seen in causal()]
    torch.testing.assert_close(out, dense(q, k, v, own, everything)[0])


def test_flashinfer_in_the_other_layout():
    q, k, v, own = pages()
    given = from_flashinfer(*flashinfer_pages(own), causal=True)
    heads_first = (x.transpose(1, 2).contiguous() for x in (k, v))  # HND: [pages, Hk, page, D]
    out, _ = specattn.hybrid_tree_attention(q, *(x.transpose(1, 2) for x in heads_first), **given)
    torch.testing.assert_close(out, dense(q, k, v, own, causal())[0])


def test_a_mask_that_hides_the_prefix_or_has_another_size_is_refused():
    own = pages()[-1]
    mask = torch.cat([seen.flatten() for seen in causal()])
    with pytest.raises(ValueError, match="custom_mask: expected 55 elements, got 54"):
        from_flashinfer(*flashinfer_pages(own), custom_mask=mask[1:])
    mask[0] = False
    with pytest.raises(ValueError, match="custom_mask: expected every row to see its whole prefix"):
        from_flashinfer(*flashinfer_pages(own), custom_mask=mask)


@pytest.mark.parametrize("left", [-1, 2])
def test_flash_attention(left):
    q, k, v, own = pages()
    most = max(len(x) for x in own)
    table = torch.tensor([x + [0] * (most - len(x)) for x in own], dtype=torch.int32)
    starts = torch.tensor([0, *ROWS]).cumsum(0).int()
    sinks = torch.linspace(-1, 1, HEADS)
    used = torch.tensor(KEYS, dtype=torch.int32)
    options = {"window_size": (left, 0), "s_aux": sinks}
    given = from_flash_attention(starts, max(ROWS), used, table, **options)
    out, lse = specattn.hybrid_tree_attention(q, k, v, **given)
    window = None if left < 0 else left + 1
    expected, expected_lse = dense(q, k, v, own, causal(window), sinks=sinks)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse_heads_first(lse), expected_lse.T)

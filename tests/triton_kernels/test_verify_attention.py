"""What `verify_attention` collects, against float64; its attention is that of the hybrid pass."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specattn.triton_kernels import _configs

import specattn
from specattn import reference
from tests.cases import assert_accurate, make_problem, problems

from .conftest import DEVICE, interpreted, mostly

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def arguments(p, paged):
    tensors = p.cache(paged) | {"k_tree": p.k_tree, "v_tree": p.v_tree, "tree_mask": p.tree_mask}
    return tensors | {"q": p.q, "cache_seqlens": p.cache_seqlens}


def verify(p, *, paged=False, **options):
    results = specattn.verify_attention(**arguments(p.to(device=DEVICE), paged), **options)
    return [x.cpu() for x in results]


def exact(p, *, paged=False, **options):
    return reference.verify_attention(**arguments(p.to(torch.float64), paged), **options)


@interpreted(20)
@given(
    p=problems(max_length=70, dtypes=DTYPES),
    paged=st.booleans(),
    window=st.sampled_from([None, 1, 3, 20]),
    softcap=st.sampled_from([0.0, 2.0]),
    rows=st.sampled_from([(0, -1), (-1,), (0,)]),
    per_head=st.booleans(),
)
def test_scores_are_mean_logits(p, paged, window, softcap, rows, per_head):
    options = {"window": window, "softcap": softcap, "collect_rows": rows, "per_head": per_head}
    _, _, scores = verify(p, paged=paged, **options)
    exact_scores = exact(p, paged=paged, **options)[2]
    by_torch = reference.verify_attention(**arguments(p.to(torch.float32), paged), **options)[2]
    assert_accurate(scores, exact_scores, by_torch, atol=2e-6)


@interpreted(15)
@given(
    p=problems(max_length=70, dtypes=DTYPES),
    paged=st.booleans(),
    window=st.sampled_from([None, 3]),
    softcap=st.sampled_from([0.0, 2.0]),
    rows=st.sampled_from([(0, -1), (-1,), (0, 0, -1)]),
)
def test_logits_are_rounded_once(p, paged, window, softcap, rows):
    options = {"window": window, "softcap": softcap, "collect": "logits", "collect_rows": rows}
    _, _, logits = verify(p, paged=paged, **options)
    exact_logits = exact(p, paged=paged, **options)[2]
    assert logits.dtype == torch.bfloat16
    assert_accurate(logits, exact_logits, exact_logits.bfloat16(), atol=1e-6)


@pytest.mark.parametrize("collect", mostly("scores", "logits"))
@pytest.mark.parametrize("rows", mostly(20, 1))
def test_collecting_changes_no_bit_of_the_attention(collect, rows):
    p = make_problem((70, 0, 33), rows, q_heads=8, dtype=torch.bfloat16)
    with _configs.forced(hopper=False):  # which takes few rows if they collect nothing
        out, lse, collected = verify(p, collect=collect)
        plain = specattn.hybrid_tree_attention(**arguments(p.to(device=DEVICE), False))
    assert torch.equal(out, plain[0].cpu())
    assert torch.equal(lse, plain[1].cpu())
    capacity = p.k_cache.shape[1]
    dead = torch.arange(capacity) >= p.cache_seqlens[:, None]
    assert (
        collected[dead.view(3, *[1] * (collected.dim() - 2), capacity).expand_as(collected)]
        .isneginf()
        .all()
    )


def test_rounding_does_not_decide_the_ranking():
    """The mean of bfloat16 queries needs more bits than bfloat16 has."""
    p = make_problem((64,), 7, q_heads=8, kv_heads=1, head_dim=128, dtype=torch.bfloat16, scale=4.0)
    scores = verify(p, collect="scores")[2][0, 0, :64]
    exact_scores = exact(p, collect="scores")[2][0, 0, :64]
    mean = p.q[:, [0, -1]].float().mean((1, 2))
    rounded = (p.k_cache[0, :64, 0].float() @ mean[0].bfloat16().float()) * 128**-0.5
    assert not torch.equal(rounded.argsort(), exact_scores.argsort())
    assert torch.equal(scores.argsort(), exact_scores.argsort())

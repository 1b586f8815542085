import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specattn
from specattn import reference
from tests.cases import assert_accurate, make_problem, problems

from .conftest import DEVICE, interpreted


def arguments(p, paged):
    tensors = p.cache(paged)
    tensors.pop("v_cache")
    return tensors | {"q": p.q, "cache_seqlens": p.cache_seqlens}


@interpreted(20)
@given(
    p=problems(max_length=70, dtypes=(torch.float32, torch.bfloat16, torch.float16)),
    paged=st.booleans(),
    per_head=st.booleans(),
    softmax_scale=st.sampled_from([None, 0.5]),
)
def test_agrees_with_the_reference(p, paged, per_head, softmax_scale):
    options = {"per_head": per_head, "softmax_scale": softmax_scale}
    scores = specattn.importance_scores(**arguments(p.to(device=DEVICE), paged), **options)
    exact = reference.importance_scores(**arguments(p.to(torch.float64), paged), **options)
    by_torch = reference.importance_scores(**arguments(p.to(torch.float32), paged), **options)
    assert_accurate(scores.cpu(), exact, by_torch, atol=2e-6)


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_head_dimensions(head_dim):
    p = make_problem((40, 0), 9, head_dim=head_dim, dtype=torch.bfloat16)
    scores = specattn.importance_scores(**arguments(p.to(device=DEVICE), False))
    exact = reference.importance_scores(**arguments(p.to(torch.float64), False))
    by_torch = reference.importance_scores(**arguments(p.to(torch.float32), False))
    assert_accurate(scores.cpu(), exact, by_torch, atol=2e-6)

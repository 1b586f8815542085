"""The CUDA kernels on a real GPU."""

import pytest
import torch

import specattn
from tests.cases import assert_accurate, expected, make_problem

pytest.importorskip("triton")

from tools.ptx.tests import cuda_cases

from . import device_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        specattn.backends()["cuda"] != "available", reason=specattn.backends()["cuda"]
    ),
]


@pytest.mark.parametrize("case", cuda_cases.SELECTED, ids=str)
def test_every_case_of_the_emulator(case):
    device_cases.check(case, "cuda", "cuda")


@pytest.mark.parametrize("first", range(0, 40, 8))
def test_select_topk(first):
    device_cases.check_selections("cuda", range(first, first + 8))


CALLS = [
    {"rows": rows, "head_dim": D, "dtype": dtype, "paged": paged, "window": window}
    for rows, D, dtype, paged, window in (
        (1, 128, torch.bfloat16, False, None),
        (4, 64, torch.float16, True, None),
        (4, 80, torch.bfloat16, True, 100),
        (8, 96, torch.bfloat16, False, None),
        (16, 128, torch.float16, False, 300),
        (16, 256, torch.bfloat16, True, None),
    )
]


def attend(p, paged, window):
    return specattn.hybrid_tree_attention(
        p.q,
        cache_seqlens=p.cache_seqlens,
        k_tree=p.k_tree,
        v_tree=p.v_tree,
        tree_mask=p.tree_mask,
        window=window,
        **p.cache(paged),
    )


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_attention(call):
    shape = {name: call[name] for name in ("rows", "head_dim", "dtype")}
    p = make_problem((3000, 700, 0), q_heads=8, page_size=16, device="cuda", **shape)
    with specattn.use_backend("cuda"):
        out, lse = attend(p, call["paged"], call["window"])
    exact, rough, single = (
        expected(p.to(dtype, "cpu"), window=call["window"])
        for dtype in (torch.float64, call["dtype"], torch.float32)
    )
    assert_accurate(out.cpu(), exact[0], rough[0], atol=1e-6)
    assert_accurate(lse.cpu(), exact[1], single[1], atol=2e-6)


def test_a_graph_stays_right_when_lengths_change():
    p = make_problem((3000, 700), q_heads=8, dtype=torch.bfloat16, device="cuda")
    with specattn.use_backend("cuda"):
        attend(p, False, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend(p, False, None)
        for lengths in ((2500, 1), (0, 699)):
            p.cache_seqlens.copy_(torch.tensor(lengths))
            graph.replay()
            for one, other in zip(captured, attend(p, False, None), strict=True):
                assert torch.equal(one, other)

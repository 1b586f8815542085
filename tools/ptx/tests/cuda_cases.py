"""Calls that the CUDA C++ kernels serve, for the emulator: chosen ones, and others at random."""

import random

import torch
from tests.cases import make_problem

import specattn

from ..cuda_launch import emulated_cuda
from .cases import SCHEDULES, Case, check

ARCHITECTURES = ("sm_80", "sm_90a")
HEAD_DIMS = (64, 80, 96, 128, 256)

QUICK = [
    Case("hybrid", sinks=True),
    Case("hybrid", rows=16, head_dim=128, paged=True, softcap=2.0, lengths=(150, 0)),
    Case("ragged hybrid", lengths=(200, 9, 0), ragged=(3, 0, 1), paged=True, window=99),
    Case("gather", "fp16", rows=1, head_dim=80, paged=True, sinks=True),
    Case("scores", rows=16, window=100),
]
# Every primitive, every shape of block (16, 32, 64 rows; teams of 1, 2, 4 warps), every feature.
SELECTED = [
    *QUICK,
    Case("hybrid", "fp16", lengths=(700, 90, 0), split_size=None, spare=2000, window=500),
    Case("hybrid", lengths=(1300,), kv_heads=1, split_size=64, sinks=True),  # merged twice
    Case("hybrid", rows=8, head_dim=96, tree="chain", window=37),
    Case("hybrid", rows=16, head_dim=256, lengths=(150, 0), kv_heads=1),
    Case("hybrid", rows=3, head_dim=80, group=7, tree="in_cache", paged=True),
    Case("tree", rows=16),
    Case("scores", lengths=(300, 9, 0), split_size=None, spare=500),
    Case("scores", head_dim=128, per_head=False, softcap=2.0, lengths=(150, 0)),
    Case("logits", "fp16", paged=True, window=100, softcap=2.0),
    Case("hybrid", rows=35, group=1, lengths=(90, 0), window=2, kv_heads=1),  # cuts the tree
    Case("ragged logits", rows=9, lengths=(70, 9), ragged=(9, 3), window=3),
    Case("ragged scores", lengths=(200, 9, 0), ragged=(1, 6, 0)),
    Case("ragged gather", "fp16", lengths=(200, 9, 0), ragged=(2, 3, 0), head_dim=80),
]  # fmt: skip


def drawn(seed):
    """Return a random case."""
    choose = random.Random(seed)
    op = choose.choice(("hybrid", "hybrid", "tree", "scores", "logits", "gather"))
    ragged = op != "tree" and choose.random() < 0.3
    group = choose.choice((1, 2, 4, 7, 8))
    most = choose.choice((16, 32, 64))
    rows = choose.randint(1, max(1, most // group))
    lengths = tuple(
        choose.choice((0, choose.randint(1, 60), choose.randint(61, 500)))
        for _ in range(choose.randint(1, 4))
    )
    windowed = op in ("hybrid", "scores", "logits") and choose.random() < 0.4
    return Case(
        f"ragged {op}" if ragged else op,
        dtype=choose.choice(("bf16", "fp16")),
        rows=rows,
        head_dim=choose.choice(HEAD_DIMS),
        lengths=lengths,
        group=group,
        kv_heads=choose.choice((1, 2)),
        paged=op != "tree" and choose.random() < 0.5,
        tree=choose.choice(("random", "chain", "in_cache")) if op in ("hybrid", "scores", "logits")
        else "random",
        window=choose.choice((1, 20, 100, 400)) if windowed else None,
        softcap=0.0 if op == "gather" or choose.random() < 0.7 else 2.0,
        sinks=op in ("hybrid", "gather") and not ragged and choose.random() < 0.4,
        per_head=op != "scores" or ragged or choose.random() < 0.7,
        split_size=choose.choice((64, 128, 256, None)),
        spare=choose.choice((1, 3, 200)),
        ragged=(rows, *(choose.choice((0, 1, choose.randint(1, rows))) for _ in lengths[1:]))
        if ragged else None,
    )  # fmt: skip


def check_selected(case, arch):
    """Execute a case in one order."""
    return check(case, arch, emulate=emulated_cuda)


def check_orders(case, arch):
    """Execute a case in two orders, which must agree in every bit."""
    return check(case, arch, SCHEDULES, emulate=emulated_cuda)


MERGED = Case("hybrid", lengths=(1300, 70), kv_heads=1, split_size=64, sinks=True)


def check_neighbours(arch):
    """See that a request's bits do not change with its neighbour and its cache's capacity."""
    results = []
    for lengths, spare in (((300, 500), 3), ((300, 0), 700)):
        p = make_problem(lengths, 4, q_heads=8, kv_heads=2, head_dim=64, spare=spare,
                         dtype=torch.bfloat16)  # fmt: skip
        first = make_problem((300,), 4, q_heads=8, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
        p.k_cache[0, :300], p.v_cache[0, :300] = first.k_cache[0, :300], first.v_cache[0, :300]
        for name in ("q", "k_tree", "v_tree", "tree_mask"):
            getattr(p, name)[0] = getattr(first, name)[0]
        with emulated_cuda(arch) as launches:
            out, lse = specattn.hybrid_tree_attention(
                p.q, p.k_cache, p.v_cache, p.cache_seqlens, p.k_tree, p.v_tree, p.tree_mask
            )
        assert launches[0].grid[1] > 1, "nothing is split"
        results.append((out[0], lse[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])

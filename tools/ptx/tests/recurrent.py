"""Layers with a state in the emulator: a tree's rows, then a commit of a path of each request."""

import torch
from tests.cases import assert_accurate
from tests.states import make_causal_conv, make_gated_delta

import specattn

from ..launch import emulated
from ..machine import Options

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GATED = {
    "chain of one": ((1,), 1, 2, 40, 16, {"tree": "chain", "dtype": BF16}),
    "tree": ((9, 16), 1, 2, 64, 72, {"dtype": BF16}),
    "strided forest": ((20, 20), 1, 1, 40, 24, {"tree": "forest", "strided": True}),
    "strong decays": ((17, 0, 5), 1, 2, 32, 24, {"decays": "strong", "dtype": FP16}),
    "as many rows as are served": ((64,), 1, 1, 32, 16, {"l2_norm": False}),
}
CONVOLUTIONS = {
    "tree": ((9, 16), 200, 4, {"dtype": BF16}),
    "chain": ((5, 5), 130, 3, {"tree": "chain", "activation": None, "bias": False}),
    "strided forest": ((20, 0, 1), 24, 8, {"tree": "forest", "strided": True, "dtype": FP16}),
    "as many rows as are served": ((64,), 40, 2, {}),
}
# Together; one warp after the other, and blocks shuffled.
ORDERS = (Options(), Options(warps=1, blocks=1, count=False))


def check_gated(sizes, arch, orders=ORDERS):
    """Verify and commit in several orders, which agree in every bit; right, or AssertionError."""
    rows, *sizes, options = sizes
    problem = make_gated_delta(rows, *sizes, **options)
    ragged = len(set(rows)) > 1
    arguments, row_options = problem.arguments(ragged), problem.row_options(ragged)
    nodes, counts = problem.paths(2)
    found = []
    for order in orders:
        state = problem.state.clone()
        with emulated(arch, order):
            out, stash = specattn.gated_delta_tree(**arguments)
            specattn.gated_delta_commit(state, stash, nodes, counts, **row_options)
        found.append((out, stash, state))
    _check_same(found)
    out, _, state = found[0]
    exact, states = problem.expected()
    rough, rough_states = problem.expected(FP32)
    assert_accurate(out.reshape(exact.shape), exact, rough.to(out.dtype), atol=2e-7)
    exact, rough = (problem.committed(x, nodes, counts) for x in (states, rough_states))
    assert_accurate(state, exact, rough, atol=5e-7)
    assert torch.equal(state[counts == 0], problem.state[counts == 0])


def check_convolution(sizes, arch, orders=ORDERS):
    """Convolve and commit in several orders, which agree; right, or AssertionError."""
    rows, *sizes, options = sizes
    problem = make_causal_conv(rows, *sizes, **options)
    ragged = len(set(rows)) > 1
    arguments, row_options = problem.arguments(ragged), problem.row_options(ragged)
    nodes, counts = problem.paths(2)
    found = []
    for order in orders:
        kept = problem.conv_state.clone()
        with emulated(arch, order):
            out = specattn.causal_conv_tree(**arguments)
            specattn.causal_conv_commit(kept, arguments["x"], nodes, counts, **row_options)
        found.append((out, kept))
    _check_same(found)
    out, kept = found[0]
    exact, exact_kept = problem.expected()
    rough, _ = problem.expected(FP32)
    assert_accurate(out.reshape(exact.shape), exact, rough.to(out.dtype), atol=2e-7)
    assert torch.equal(kept, problem.committed(exact_kept, nodes, counts).to(kept.dtype))


def _check_same(found):
    for others in zip(*found, strict=True):
        assert all(torch.equal(x, others[0]) for x in others), "the order shows in the result"

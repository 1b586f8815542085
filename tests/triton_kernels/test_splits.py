"""How requests are cut: by their own lengths alone, into a workspace of bounded size."""

import pytest
import torch
from specattn.triton_kernels import _configs

import specattn
from tests.cases import assert_accurate, expected, make_problem

from .conftest import DEVICE, WHOLE, mostly

BIG_GPU = {"multiprocessors": 132, "split_size": None, "least": 32}


def attend(p, lengths, **options):
    """Call on requests that are the first of ``lengths`` of ``p``'s cached keys."""
    p = p.to(device=DEVICE)
    results = specattn.hybrid_tree_attention(
        p.q,
        p.k_cache,
        p.v_cache,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        p.k_tree,
        p.v_tree,
        p.tree_mask,
        **options,
    )
    return [x.cpu() for x in results]


@pytest.mark.parametrize("length", mostly(200, 0, 31, 33, 511))
@pytest.mark.parametrize("window", mostly(150, None))
def test_capacity_shows_in_no_bit(length, window):
    narrow = make_problem((length,), 3, dtype=torch.bfloat16, spare=1)
    wide = make_problem((length,), 3, dtype=torch.bfloat16, spare=900)
    wide.q, wide.k_tree, wide.v_tree = narrow.q, narrow.k_tree, narrow.v_tree
    wide.tree_mask = narrow.tree_mask
    wide.k_cache[:, :length] = narrow.k_cache[:, :length]
    wide.v_cache[:, :length] = narrow.v_cache[:, :length]
    with _configs.forced(**BIG_GPU):
        found = [attend(p, (length,), window=window) for p in (narrow, wide)]
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
    exact, rough, single = (
        expected(narrow.to(dtype), window=window)
        for dtype in (torch.float64, torch.bfloat16, torch.float32)
    )
    assert_accurate(found[0][0], exact[0], rough[0], atol=1e-6)
    assert_accurate(found[0][1], exact[1], single[1], atol=2e-6)


@WHOLE
def test_lengths_of_neighbours_show_in_no_bit():
    """So a captured graph, whose launches do not change, stays right when lengths do."""
    p = make_problem((400, 400, 400), 3, dtype=torch.bfloat16)
    with _configs.forced(**BIG_GPU):
        first = attend(p, (400, 130, 0))
        second = attend(p, (33, 130, 400))
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x[1], y[1])
        assert not torch.equal(x[0], y[0])


def splits_of(batch, tokens, group, span, *, arch="sm_90", kv_heads=8, head_dim=128):
    """Return (splits, bytes of workspace) of a hybrid call."""
    rows = tokens * group
    device = torch.device("cuda")
    with _configs.forced(arch=arch, multiprocessors=132, split_size=None):
        config = _configs.attention_config(
            device, torch.bfloat16, rows, _configs.widths_of(head_dim, head_dim), 0
        )
        programs = batch * kv_heads * -(-rows // config.block_m)
        state_bytes = 4 * batch * rows * kv_heads * (head_dim + 1)
        splits = _configs.splits(
            device, config, rows, programs, span, state_bytes, alone=batch == 1
        )
    return splits, splits.slots * state_bytes if splits.slots > 1 else 0


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("tokens", [1, 16, 64, 2048])
@pytest.mark.parametrize("span", [100, 8192, 2**17, 2**20])
def test_the_workspace_is_bounded(batch, tokens, span):
    assert splits_of(batch, tokens, 8, span)[1] <= 64 * 2**20


def test_a_large_batch_needs_no_workspace():
    assert splits_of(32, 64, 8, 2**17)[1] == 0


def test_one_request_fills_the_gpu():
    splits, _ = splits_of(1, 1, 4, 2**17)
    assert 0.9 * 132 <= 8 * splits.slots <= 132


def test_long_requests_of_a_large_batch_are_cut():
    assert splits_of(16, 1, 4, 2**17)[0].slots == 32


@pytest.mark.parametrize(("tokens", "span", "slots"), [(1, 8192, 16), (16, 2**15, 16)])
def test_partial_results_of_one_request_stay_small(tokens, span, slots):
    """A second program per SM comes where its keys pay for it, to 64 rows; a third wave never.

    Before Triton 3.7, 64 rows are two tiles of 8 warps, of which an SM holds one program.
    """
    most = 16 * (1 + (tokens == 16))
    if _configs.UNFENCED and tokens == 16:
        slots = most = 132 // (8 * 2)
    for keys in (span, 2**17):
        assert splits_of(1, tokens, 4, keys)[0].slots == slots
    assert splits_of(1, tokens, 4, 2**20)[0].slots == most


def on_hopper(batch, tokens, span):
    """Return the splits of a call of the Hopper kernel, 4 query heads for each of 8."""
    device, rows = torch.device("cuda"), 4 * tokens
    with _configs.forced(arch="sm_90", multiprocessors=132, split_size=None):
        config = _configs.HOPPER[64 if rows <= 64 else 128, 128]
        programs = 8 * batch * -(-rows // config.block_m)
        return _configs.splits(device, config, rows, programs, span, 1, alone=batch == 1)


@pytest.mark.parametrize(("tokens", "slots"), [(1, 16), (16, 16), (32, 8), (64, 8)])
def test_short_requests_fill_a_hopper_gpu(tokens, slots):
    assert on_hopper(1, tokens, 4096).slots == slots


@pytest.mark.parametrize(("tokens", "slots"), [(1, 2), (16, 2), (32, 2), (64, 1)])
def test_a_batch_of_32k_keys_is_one_wave(tokens, slots):
    assert on_hopper(8, tokens, 32768 + tokens).slots == slots
    assert on_hopper(8, tokens, 2**18).slots >= 4 * slots  # of which some may be short


def test_few_keys_fill_a_gpu_all_the_same():
    assert [on_hopper(1, 1, keys).slots for keys in (64, 512, 1024, 2300)] == [1, 8, 16, 16]
    assert [on_hopper(1, 8, keys).slots for keys in (512, 1024)] == [2, 4]

"""What the host does for a call, on GPUs that are not there: see `stub_driver`."""

from functools import partial

import pytest
import torch
from specattn.triton_kernels._configs import UNFENCED

import specattn

from . import host_cases
from .conftest import WHOLE, mostly


@pytest.mark.parametrize("device", [0, 1])
def test_launches_are_on_the_device_of_the_tensors(compiler_process, device):
    """And in its current stream, planned or not; afterwards the current device is as it was."""
    launches, number, current = compiler_process(host_cases.places, device)
    assert launches == {(device, 1000 + device)}
    assert number == 2 * 15
    assert current == 0


def test_plans_launch_what_the_function_would(compiler_process):
    """Calls that differ in one shape, stride, type, device, alignment or value, interleaved."""
    different, as_written, calls = compiler_process(host_cases.planned_and_plain)
    assert not different
    # Once per call to plan it; the six of unaligned queries always run as they are written.
    assert as_written == calls // 3 + 4


def test_values_that_are_views_have_a_plan_of_their_own(compiler_process):
    """They are loaded with their keys, which equal forms do not say."""
    plans = partial(host_cases.planned_and_plain, host_cases.calls_with_latents)
    different, as_written, _ = compiler_process(plans)
    assert not different
    assert as_written == 2


def test_a_result_that_is_added_to_has_a_plan_of_its_own(compiler_process):
    plans = partial(
        host_cases.planned_and_plain, host_cases.calls_of_layers, specattn.linear_few_rows
    )
    different, as_written, _ = compiler_process(plans)
    assert not different
    assert as_written == 4


def test_rounds_are_planned(compiler_process):
    """Drawn greedily and by seeds of any size, of 32 bits and of 64: each kind is planned once."""
    (drawn, moved), kinds = compiler_process(host_cases.rounds)
    assert drawn == kinds
    assert moved == 1


def test_few_variants_serve_the_levels_of_all_trees(compiler_process):
    """A draft that grows or shrinks would wait for each."""
    counts = compiler_process(host_cases.variants_of_levels)
    assert counts["part_kernel"] == 1
    assert counts["node_kernel"] == 2  # up to 8 children of a node, and more
    assert counts["choose_kernel"] <= 2 * 3  # up to 256 candidates, and more; words of a mask


def test_one_variant_writes_rows_of_any_number(compiler_process):
    assert compiler_process(host_cases.variants_of_writes) == {"write_kv_kernel": 1}


@pytest.mark.parametrize(("cuda", "early"), [(12020, False), (12030, True), (13000, True)])
def test_a_driver_without_such_graphs_starts_nothing_early(compiler_process, cuda, early):
    """Before CUDA 12.3 graphs do not hold launches that start early: none would be captured."""
    assert compiler_process(partial(host_cases.starts_early, cuda)) == (early, True)


def test_three_variants_serve_layers_of_one_width(compiler_process):
    """Of 16, 32 and 64 rows."""
    assert compiler_process(host_cases.variants_of_layers) == {"linear_few_rows_kernel": 3}


@pytest.mark.parametrize(("primitive", "expected"), [("hybrid", 1), ("verify", 2)])
def test_a_window_costs_no_operators(compiler_process, primitive, expected):
    """The kernel trims the tree's mask and counts depths, in every layer."""
    function = host_cases.FUNCTIONS[primitive]
    computing, launches = compiler_process(host_cases.operators_within_a_window, function)
    assert not computing
    assert launches == expected


COMBINES = 4  # of 2, 4, 8 and 16 slots


@pytest.mark.parametrize("primitive", mostly(*host_cases.FUNCTIONS))
def test_few_variants_serve_all_sizes(compiler_process, primitive):
    """A call in the middle of decoding would wait seconds for another one."""
    counts = compiler_process(host_cases.variants, primitive)
    tiles, blocks = 2 if UNFENCED else 4, 0  # of 16, 32, 64 and 128 rows; Gluon's of 64 and 128
    if primitive == "gather per row":
        tiles = 1  # of one row's heads
    elif primitive == "hybrid":
        tiles, blocks = 0, 2  # all by Gluon's kernel
    elif primitive == "verify":  # up to 16 rows by the one, up to 64 by Gluon's, more by a new one
        tiles, blocks = (2, 1) if UNFENCED else (1, 2)
    # The largest writes states, or the result where one split suffices.
    assert blocks <= counts["hopper_kernel"] <= blocks + min(blocks, 1)
    assert tiles <= counts["split_kv_kernel"] <= tiles + min(tiles, 1)
    assert counts["combine_kernel"] <= COMBINES


def test_gluon_is_left_alone_before_it_has_passed(compiler_process):
    assert "hopper_kernel" not in compiler_process(host_cases.unproved, "hybrid")


@WHOLE
@pytest.mark.parametrize("primitive", ["hybrid", "gather"])
@pytest.mark.parametrize("scales", ["heads", "tokens"])
def test_few_variants_serve_all_sizes_of_a_cache_of_8_bits(compiler_process, primitive, scales):
    """Split-KV kernels alone: of as many tiles as rows make, and one more as above."""
    cached = {"stored": torch.float8_e4m3fn, "scales": scales}
    counts = compiler_process(partial(host_cases.variants, primitive, **cached))
    tiles = 2 if UNFENCED else 4
    assert set(counts) == {"split_kv_kernel", "combine_kernel"}
    assert tiles <= counts["split_kv_kernel"] <= tiles + 1
    assert counts["combine_kernel"] <= COMBINES


@WHOLE
@pytest.mark.parametrize(
    "cached", [{}, {"stored": torch.int8, "scales": "tokens"}], ids=["16 bits", "int8"]
)
def test_after_warmup_nothing_is_compiled(compiler_process, cached):
    before, after = compiler_process(partial(host_cases.variants_after_warmup, **cached))
    assert before >= 6
    assert not after


def test_kernels_are_compiled_ahead_each_once_and_nothing_is_launched(compiler_process):
    """By other threads; what is launched behind it finds all of them."""
    launched, before, distinct, after, launches, same_thread = compiler_process(host_cases.ahead)
    assert launched == 0
    assert before == distinct >= 4
    assert not after
    assert launches > 64
    assert not same_thread

"""`linear_few_rows`, compiled for GPUs that are not here and executed."""

import pytest

pytest.importorskip("triton")

from . import linear

WHOLE = pytest.mark.gpu_code("triton")
ARCHITECTURES = ("sm_90", "sm_80")
QUICK = [("gate and up", "sm_90"), ("no multiples, 33 rows, strided", "sm_80")]
OTHERS = [(n, a) for n in linear.LAYERS for a in ARCHITECTURES if (n, a) not in QUICK]


@pytest.mark.parametrize(
    ("name", "arch"), [*QUICK, *(pytest.param(*x, marks=WHOLE) for x in OTHERS)]
)
def test_layer(compiler_process, name, arch):
    compiler_process(linear.check_layer, linear.LAYERS[name], arch)


@WHOLE
@pytest.mark.parametrize("name", linear.LAYERS)
def test_tensor_cores_may_cut_sums_off(compiler_process, name):
    compiler_process(linear.check_layer, linear.LAYERS[name], "sm_90", linear.CUT_OFF)


@pytest.mark.parametrize(
    ("outputs", "dtype", "arch"),
    [
        (40, linear.BF16, "sm_90"),
        *(
            pytest.param(outputs, dtype, arch, marks=WHOLE)
            for outputs, dtype, arch in (
                (40, linear.FP16, "sm_80"),
                (4100, linear.BF16, "sm_80"),
                (20, linear.FP32, "sm_90"),
                (20, linear.FP32, "sm_80"),
            )
        ),
    ],
)
def test_a_row_has_the_same_bits_among_any_others(compiler_process, outputs, dtype, arch):
    compiler_process(linear.check_bits, outputs, dtype, arch)


@pytest.mark.parametrize(
    ("sizes", "rows", "biased", "added"),
    [
        ((64, 32, 32), 5, False, False),
        pytest.param((64, 24, 40), 40, True, True, marks=WHOLE),
        pytest.param((33, 50), 17, True, False, marks=WHOLE),
    ],
)
@pytest.mark.parametrize("arch", [ARCHITECTURES[0], pytest.param(ARCHITECTURES[1], marks=WHOLE)])
def test_weights_side_by_side(compiler_process, sizes, rows, biased, added, arch):
    compiler_process(linear.check_parts, sizes, rows, biased, added, arch)


@WHOLE
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sums_are_chains_of_one_instruction(compiler_process, arch):
    """Others, as wgmma for 64 rows, would sum in another order."""
    one = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    assert compiler_process(linear.matrix_instructions, arch) == {n: {one} for n in (1, 17, 64)}


@WHOLE
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_residual_may_be_the_result(compiler_process, arch):
    compiler_process(linear.check_in_place, arch)


@WHOLE
def test_what_is_no_number_stays_where_it_is(compiler_process):
    compiler_process(linear.check_no_numbers, "sm_90")


@pytest.mark.parametrize(
    ("rows", "outputs", "depth", "gated"),
    [
        (8, 4096, 4096, False),
        pytest.param(8, 4096, 4096, True, marks=WHOLE),
        pytest.param(32, 1024, 4096, False, marks=WHOLE),
        pytest.param(64, 4096, 4096, True, marks=WHOLE),
    ],
)
def test_weights_are_read_once_and_whole(compiler_process, rows, outputs, depth, gated):
    """In whole sectors, without conflicts in shared memory, by few enough instructions."""
    counts, weights, programs = compiler_process(linear.counted, rows, outputs, depth, gated)
    assert counts.bytes_read == weights + programs * rows * depth * 2
    assert 32 * counts.sectors_read == counts.bytes_read
    assert 32 * counts.sectors_written == counts.bytes_written == rows * outputs * 2
    assert counts.shared_conflicts == 0
    # A lane's share of a weight: at 19 an H100 would issue as long as it reads.
    assert 32 * counts.total_instructions / (weights / 2) < (4.5 if rows <= 32 else 9)


@WHOLE
def test_products_of_a_step_of_one_row_move_what_they_need(compiler_process):
    """Each program reads the row, so products of narrow programs move 6% more."""
    each, whole = compiler_process(linear.of_a_step, 1)
    assert max(each) < 1.07
    assert whole < 1.05

"""`linear_few_rows` of codes, compiled for GPUs that are not here and executed."""

import pytest

pytest.importorskip("triton")

from specattn.triton_kernels._configs import UNFENCED

from . import linear_codes

WHOLE = pytest.mark.gpu_code("triton")
ARCHITECTURES = ("sm_90", "sm_80")
QUICK = [("4 bits, 20 rows", "sm_90"), ("8 bits, gate", "sm_80"), ("floats, gate", "sm_90")]
OTHERS = [(n, a) for n in linear_codes.LAYERS for a in ARCHITECTURES if (n, a) not in QUICK]


@pytest.mark.parametrize(
    ("name", "arch"), [*QUICK, *(pytest.param(*x, marks=WHOLE) for x in OTHERS)]
)
def test_layer(compiler_process, name, arch):
    compiler_process(linear_codes.check_layer, linear_codes.LAYERS[name], arch)


@WHOLE
@pytest.mark.parametrize("name", linear_codes.LAYERS)
def test_tensor_cores_may_cut_sums_off(compiler_process, name):
    compiler_process(
        linear_codes.check_layer, linear_codes.LAYERS[name], "sm_90", linear_codes.CUT_OFF
    )


@pytest.mark.parametrize(
    ("bits", "dtype", "arch"),
    [
        (4, linear_codes.BF16, "sm_90"),
        *(
            pytest.param(bits, dtype, arch, marks=WHOLE)
            for bits, dtype, arch in (
                (8, linear_codes.BF16, "sm_90"),
                (4, linear_codes.FP16, "sm_80"),
                (8, linear_codes.FP16, "sm_80"),
                ("e4m3", linear_codes.BF16, "sm_90"),
                ("e4m3", linear_codes.FP16, "sm_80"),
                (4, linear_codes.FP32, "sm_90"),
            )
        ),
    ],
)
def test_a_row_has_the_same_bits_among_any_others(compiler_process, bits, dtype, arch):
    compiler_process(linear_codes.check_bits, bits, dtype, arch)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("4 bits", "sm_90"),
        *(
            pytest.param(name, arch, marks=WHOLE)
            for name in linear_codes.PARTS
            for arch in ARCHITECTURES
            if (name, arch) != ("4 bits", "sm_90")
        ),
    ],
)
def test_weights_side_by_side(compiler_process, name, arch):
    compiler_process(linear_codes.check_parts, *linear_codes.PARTS[name], arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [linear_codes.BF16, linear_codes.FP16, linear_codes.FP32])
def test_every_float_is_exact(compiler_process, dtype, arch):
    compiler_process(linear_codes.check_every_float, dtype, arch)


@WHOLE
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bits", [4, 8, "e4m3"])
def test_sums_are_chains_of_one_instruction(compiler_process, arch, bits):
    """Others, as wgmma for 64 rows, would sum in another order."""
    one = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    found = compiler_process(linear_codes.matrix_instructions, arch, bits)
    assert found == {n: {one} for n in (1, 17, 64)}


@pytest.mark.parametrize(
    ("rows", "groups", "bits", "form", "zeros", "moved", "most"),
    [
        (8, 64, 4, "alone", False, 1.05, 7.2),
        (8, 64, 8, "q, k, v", False, 1.05, 7.2),
        *(
            pytest.param(*case, marks=WHOLE)
            for case in (
                (16, 32, 4, "gated", True, 1.05, 6.8),
                (1, 128, 4, "gated", True, 1.26, 8.9),
                (8, 64, 8, "alone", True, 1.06, 8.6),
                (16, 1, 8, "gated", False, 1.05, 6.8),
                (8, 32, "e4m3", "alone", False, 1.05, 6.4),
                (16, 32, "e4m3", "gated", False, 1.05, 5.3),
                (1, 64, 4, "q, k, v", True, 1.26, 8.9),
            )
        ),
    ],
)
def test_codes_are_read_once(compiler_process, rows, groups, bits, form, zeros, moved, most):
    """Without conflicts in shared memory, by few enough instructions, a third of which ptxas drops.

    A sector of scales or zero points is asked for by up to four warps, all but one from L1.
    """
    sizes = (4096, 1024, 1024) if form == "q, k, v" else (4096,)
    layer = rows, sizes, 4096, groups, bits, form == "gated", zeros
    found = compiler_process(linear_codes.counted, *layer)
    counts, codes, beside, programs = found
    needed = codes + beside + programs * rows * 4096 * 2
    assert counts.bytes_read >= needed
    assert zeros or counts.bytes_read <= 1.003 * needed
    assert 32 * counts.sectors_read <= moved * needed
    assert 32 * counts.sectors_written == counts.bytes_written == rows * sum(sizes) * 2
    # Older Tritons read zero points of 8 bits from shared memory with conflicts.
    allowed = 0.4 * counts.shared_requests if UNFENCED and zeros and bits == 8 else 0
    assert counts.shared_conflicts <= allowed
    assert 32 * counts.total_instructions / (codes * (2 if bits == 4 else 1)) < most

"""Who attends where nothing was measured on the GPU itself."""

import pytest

from specattn import gpu_record

KIB = 1024


@pytest.mark.parametrize(
    ("rows", "context", "batch", "options", "fastest"),
    [
        (4, 4 * KIB, 1, {}, "gluon"),
        (16, 32 * KIB, 1, {}, "gluon"),
        (4, 4 * KIB, 8, {}, "gluon"),
        (4, 64 * KIB, 1, {}, "triton"),
        (4, 32 * KIB, 8, {}, "triton"),
        (17, 128 * KIB, 8, {}, "gluon"),
        (17, 4 * KIB, 1, {"gluon": False}, "triton"),
        (4, 8 * KIB, 1, {"gluon": False}, "cuda"),
        (4, 32 * KIB, 1, {"gluon": False}, "triton"),
        (4, 8 * KIB, 1, {"collects": True}, "cuda"),
        (4, 32 * KIB, 1, {"collects": True}, "triton"),
        (32, 8 * KIB, 1, {"collects": True}, "gluon"),
        (4, 2 * KIB, 1, {"gluon": False, "op": "sparse_gather_attention"}, "triton"),
        (64, 128 * KIB, 1, {"gluon": False, "arch": "sm_80"}, "cuda"),
        (4, 8 * KIB, 1, {"gluon": False, "arch": "sm_100"}, "cuda"),
        (17, 8 * KIB, 1, {"gluon": False, "arch": "sm_100"}, "triton"),
    ],
)
def test_attention_is_left_to_whom_an_h100_found_fastest(rows, context, batch, options, fastest):
    given = {"op": "hybrid_tree_attention", "arch": "sm_90", "collects": False, "gluon": True}
    given |= options
    shape = gpu_record.Shape(given.pop("op"), "bf16", 128, rows, context, batch)
    arch = given.pop("arch")
    assert gpu_record.fastest_attention(shape, arch, 132, 8, **given) == fastest

"""What stands between a layer's products, compiled for GPUs that are not here and executed."""

import pytest

pytest.importorskip("triton")

from . import layer_steps

WHOLE = pytest.mark.gpu_code("triton")


def cases(names):
    """Return (case, architecture) of all, of which the first always runs."""
    first, *others = [(name, arch) for name in names for arch in ("sm_90", "sm_80")]
    return [first, *(pytest.param(*other, marks=WHOLE) for other in others)]


@pytest.mark.parametrize(("name", "arch"), cases(layer_steps.HEADS))
def test_rotate_heads(compiler_process, name, arch):
    compiler_process(layer_steps.check_rotated, layer_steps.HEADS[name], arch)


@pytest.mark.parametrize(("name", "arch"), cases(layer_steps.ROWS))
def test_norms_and_gates(compiler_process, name, arch):
    compiler_process(layer_steps.check_steps, *layer_steps.ROWS[name], arch)


@WHOLE
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_a_row_has_the_same_bits_among_any_others(compiler_process, arch):
    compiler_process(layer_steps.check_bits, arch)


@WHOLE
def test_heads_are_read_once_in_whole_sectors(compiler_process):
    """Beside them angles and norms, of each program; keys and values are written twice."""
    counts, heads = compiler_process(layer_steps.counted)
    assert 32 * counts.sectors_written == counts.bytes_written == heads + heads // 6
    assert 32 * counts.sectors_read < 1.01 * counts.bytes_read
    assert counts.shared_conflicts == 0


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=WHOLE)])
def test_what_starts_early_waits_before_it_reads(compiler_process, arch):
    """Products ask for their weights before. GPUs before sm_90 have no such launches."""
    names = "rotate_heads", "norm", "gate", "part", "node", "choose", "split_kv", "combine"
    expected = {f"{name}_kernel": (int(arch == "sm_90"), 0) for name in names}
    found = compiler_process(layer_steps.early, arch)
    for name in ("linear_few_rows_kernel", "linear_codes_kernel"):
        waits, prefetches = found.pop(name)
        assert (waits, prefetches > 0) == (int(arch == "sm_90"), arch == "sm_90")
    assert found == expected

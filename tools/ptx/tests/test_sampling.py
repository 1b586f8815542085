"""What `bench/run_kernels.py --emulate` relies on."""

import pytest

pytest.importorskip("triton")

from . import sampling


@pytest.mark.gpu_code("triton")
def test_few_blocks_count_for_all(compiler_process):
    """Four heads and seven slots: nine blocks of the 28 are executed."""
    whole, sampled = compiler_process(sampling.both)
    assert [name for name, _ in whole] == ["split_kv_kernel", "combine_kernel"]
    for (_, exact), (_, scaled) in zip(whole, sampled, strict=True):
        for name in ("bytes_read", "bytes_written", "sectors_read", "sectors_written"):
            assert getattr(scaled, name) == getattr(exact, name)
        for name in ("blocks", "barriers", "shared_requests", "shared_conflicts"):
            assert getattr(scaled, name) == getattr(exact, name)
        # The combine of partial results that no block wrote may take another branch.
        assert scaled.total_instructions == pytest.approx(exact.total_instructions, rel=0.01)

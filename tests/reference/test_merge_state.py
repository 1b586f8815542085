import pytest
import torch

from specattn import reference


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
@pytest.mark.parametrize("content", [0.0, torch.nan])
def test_an_empty_state_changes_no_bit(empty, content):
    out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
    nothing = torch.full_like(out, content), torch.full_like(lse, empty)
    for merged in (
        reference.merge_state(out, lse, *nothing),
        reference.merge_state(*nothing, out, lse),
    ):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)

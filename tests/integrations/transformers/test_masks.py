"""A mask that is carried as numbers is, for everybody else, the mask that it stands for."""

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from specattn.integrations.transformers.masks import Carrier, mask

PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]]).bool()
FORMS = {
    "causal": {"batch_size": 2, "q_length": 3, "kv_length": 8, "q_offset": 5},
    "static": {"batch_size": 2, "q_length": 1, "kv_length": 12, "q_offset": torch.tensor(7)},
    "window": {
        "batch_size": 2, "q_length": 2, "kv_length": 5, "q_offset": 6, "kv_offset": 3,
        "mask_function": sliding_window_causal_mask_function(4),
    },
    "padded": {"batch_size": 2, "q_length": 8, "kv_length": 8, "attention_mask": PADDING},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_it_becomes_the_mask_when_touched(form):
    carrier = mask(**FORMS[form])
    expected = sdpa_mask(**FORMS[form], allow_is_causal_skip=False)
    assert isinstance(carrier, Carrier)
    assert isinstance(carrier.contiguous(), Carrier)
    assert isinstance(carrier.to("cpu"), Carrier)
    assert (carrier.shape, carrier.dtype) == (expected.shape, torch.bool)
    for found in (carrier.clone(), carrier[:], torch.cat([carrier, carrier])[:2]):
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
    assert torch.equal(carrier.to(torch.float32), expected.float())
    assert torch.equal(carrier.visible.dense(eager_mask) == 0, expected)
    q, k = torch.randn(2, 2, expected.shape[2], 8), torch.randn(2, 2, expected.shape[3], 8)
    attend = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(
        attend(q, k, k, attn_mask=carrier), attend(q, k, k, attn_mask=expected), equal_nan=True
    )


@pytest.mark.parametrize(
    "options",
    [
        {"mask_function": chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))},
        {"mask_function": and_masks(causal_mask_function, lambda b, h, q, k: k != 2)},
        {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]] * 2).bool()},
        {"attention_mask": PADDING[:, :6]},
    ],
    ids=["chunked", "custom", "hole", "short"],
)
def test_other_masks_are_those_of_sdpa(options):
    form = {"batch_size": 2, "q_length": 3, "kv_length": 8, "q_offset": 5, **options}
    found = mask(**form)
    assert type(found) is torch.Tensor
    assert torch.equal(found, sdpa_mask(**form))

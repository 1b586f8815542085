"""What the primitives cannot express is transformers' own, said once for each reason."""

import warnings

import pytest
import torch

from specattn.integrations.transformers import attention
from tests.decoding.models import tiny_model
from tests.integrations.transformers.models import LEFT, eager, ours, padded


@pytest.fixture(autouse=True)
def _nothing_was_said():
    attention._warn.cache_clear()


def said(call):
    """Return what a call, made twice, returned the first time, and our warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
        call()
    return result, [str(w.message) for w in caught if LEFT in str(w.message)]


def custom(ids):
    mask = torch.ones(len(ids), 1, ids.shape[1], ids.shape[1]).tril().bool()
    mask[..., 5:, 2] = False
    return mask


CALLS = {
    "the mask is neither causal": lambda ids: {"attention_mask": custom(ids)},
    "or has holes": lambda ids: {"attention_mask": (torch.arange(ids.shape[1]) != 3)[None].long()},
    "output_attentions=True": lambda ids: {"output_attentions": True},
    "cu_seq_lens_q cannot be expressed": lambda ids: {"cu_seq_lens_q": torch.tensor([0, 1])},
}


def test_layers_with_latents_say_what_attends_to_them():
    model, (ids, _) = tiny_model("deepseek_v3"), padded((12,))
    with torch.no_grad():
        expected = eager(model)(ids).logits
        found, texts = said(lambda: ours(model)(ids).logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert len(texts) == 1
    assert "specattn.decoding.generate attends to the latents themselves" in texts[0]


@pytest.mark.parametrize("reason", CALLS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_calls(family, reason):
    model, (ids, _) = tiny_model(family), padded((12,))
    options = CALLS[reason](ids)
    with torch.no_grad():
        expected = eager(model)(ids, **_for_eager(options))
        found, texts = said(lambda: ours(model)(ids, **options))
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-4)
    assert len(texts) == 1
    assert reason in texts[0]
    if "output_attentions" in options:
        for one, other in zip(found.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def _for_eager(options):
    """Eager attention adds a mask of four dimensions."""
    mask = options.get("attention_mask")
    if mask is None or mask.dtype != torch.bool:
        return options
    return {"attention_mask": torch.where(mask, 0.0, torch.finfo(torch.float32).min)}


def test_bidirectional():
    model, (ids, _) = tiny_model("llama", is_causal=False), padded((12,))
    with torch.no_grad():
        expected = eager(model)(ids).logits
        found, texts = said(lambda: ours(model)(ids).logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert len(texts) == 1
    assert "bidirectional" in texts[0]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3"])
def test_gradients_are_those_of_transformers(family):
    model, (ids, mask) = tiny_model(family), padded((12,))

    def gradient():
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad

    expected = (eager(model), gradient())[1].clone()
    found, texts = said((ours(model), gradient)[1])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert expected.abs().max() > 0
    assert len(texts) == 1
    assert "gradient" in texts[0]


def test_dropout():
    model, (ids, _) = ours(tiny_model("llama", attention_dropout=0.5)).train(), padded((12,))
    with torch.no_grad():
        _, texts = said(lambda: model(ids))
    assert len(texts) == 1
    assert "dropout=0.5" in texts[0]


def test_head_dimension():
    model, (ids, _) = tiny_model("llama", head_dim=4), padded((12,))
    with torch.no_grad():
        expected = eager(model)(ids).logits
        found, texts = said(lambda: ours(model)(ids).logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert len(texts) == 1
    assert "heads of 4" in texts[0]

"""Decoding heads: their equations, how they begin, and the folder they are saved to."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specattn.drafters import LongSpecDrafter, MedusaHeads, TokenSwiftHeads
from tests.decoding.models import CONFIGS, tiny_model
from tests.drafters.statement import random_drafter

KINDS = {"tokenswift": TokenSwiftHeads, "medusa": MedusaHeads}


def random_heads(kind, model, *, num_heads=3, seed=0, scale=0.3, dtype=torch.float64):
    """Return heads for `model` in which every weight matters."""
    drafter = KINDS[kind].for_target(model, target="tiny", num_heads=num_heads).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(scale * noise)
    return drafter.eval()


def stated(kind, weights, h_0):
    """Return h_1, h_2, ... of one token, as the papers write them."""
    outs, h = [], h_0
    for i in range(len([name for name in weights if name.endswith("weight")])):
        w = weights[f"linears.{i}.weight"]
        if kind == "tokenswift":
            h = torch.stack([w[n] @ h + h[n] for n in range(len(h))])
        else:
            x = w @ h_0 + weights[f"linears.{i}.bias"]
            h = h_0 + x / (1 + (-x).exp())
        outs.append(h)
    return torch.stack(outs)


@pytest.mark.parametrize("kind", KINDS)
@given(
    leading=st.lists(st.integers(0, 3), max_size=3),
    num_heads=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_heads_are_the_papers_equations(kind, leading, num_heads, seed):
    model = tiny_model("llama", hidden_size=8, num_hidden_layers=1)
    drafter = random_heads(kind, model, num_heads=num_heads, seed=seed)
    features = torch.randn(*leading, 8, dtype=torch.float64)
    with torch.no_grad():
        out = drafter(features)
    assert out.shape == (*leading, num_heads, 8)
    weights = drafter.state_dict()
    for actual, h_0 in zip(out.view(-1, num_heads, 8), features.view(-1, 8), strict=True):
        torch.testing.assert_close(actual, stated(kind, weights, h_0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", CONFIGS)
def test_untrained_heads_repeat_the_targets_next_token(kind, family):
    model = tiny_model(family)
    drafter = KINDS[kind].for_target(model, target="tiny", num_heads=2)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        features = model.base_model(ids).last_hidden_state
        logits = model.get_output_embeddings()(drafter(features))
        expected = model(ids).logits
    torch.testing.assert_close(logits, expected[:, :, None].expand(-1, -1, 2, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_learns_from_the_start(kind):
    drafter = KINDS[kind].for_target(tiny_model("qwen3"), target="tiny")
    drafter(torch.randn(7, 32)).pow(3).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in drafter.parameters())


def test_only_chained_heads_depend_on_the_heads_before():
    model, features = tiny_model("qwen3"), torch.randn(4, 32, dtype=torch.float64)
    for kind, chained in (("tokenswift", True), ("medusa", False)):
        drafter = random_heads(kind, model)
        with torch.no_grad():
            before = drafter(features)
            drafter.linears[0].weight.mul_(2)
            after = drafter(features)
        changed = [not torch.equal(before[:, i], after[:, i]) for i in range(3)]
        assert changed == [True, chained, chained]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_keeps_everything(tmp_path, kind):
    drafter = random_heads(kind, tiny_model("qwen3", vocab_size=1000), num_heads=4)
    assert not any(1000 in weight.shape for weight in drafter.state_dict().values())
    drafter.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    again = KINDS[kind].from_pretrained(tmp_path, dtype=torch.float64)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {name: config[name] for name in ("target", "num_heads", "hidden_size", "vocab_size")}
    assert kept == {"target": "tiny", "num_heads": 4, "hidden_size": 32, "vocab_size": 1000}


def test_drafters_are_not_taken_for_one_another(tmp_path):
    model = tiny_model("qwen3")
    random_heads("medusa", model).save_pretrained(tmp_path / "medusa")
    random_drafter(model, window=6).save_pretrained(tmp_path / "longspec")
    with pytest.raises(ValueError, match="type 'medusa', not a TokenSwift drafter"):
        TokenSwiftHeads.from_pretrained(tmp_path / "medusa")
    with pytest.raises(ValueError, match="type 'longspec', not a Medusa drafter"):
        MedusaHeads.from_pretrained(tmp_path / "longspec")
    with pytest.raises(ValueError, match="type 'medusa', not a LongSpec drafter"):
        LongSpecDrafter.from_pretrained(tmp_path / "medusa")


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_named(kind):
    model = tiny_model("llama")
    drafter = random_heads(kind, model, dtype=torch.float32)
    with pytest.raises(ValueError, match="its hidden_size is 32, the target's is 64"):
        drafter.config.check_target(tiny_model("llama", hidden_size=64).config)
    with pytest.raises(ValueError, match=r"features: expected \[..., 32\], got \[2, 31\]"):
        drafter(torch.zeros(2, 31))
    with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
        KINDS[kind].for_target(model, target="tiny", num_heads=0)

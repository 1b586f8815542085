"""PosS' drafter: its equations along whole texts, whose gradient is whose, and its folder."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from specattn.drafters import PosSConfig, PosSDrafter
from specattn.drafters import path_attention as path
from specattn.drafters.path_attention import path_attention
from tests.decoding.models import CONFIGS, tiny_model
from tests.drafters.poss_statement import BOTH_NORMS, Statement, random_drafter

ROWS, LENGTH, DEPTH = 2, 9, 5


def text(drafter, *, seed=3):
    """Return random embeddings and features of `ROWS` texts."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, ROWS, LENGTH, drafter.config.hidden_size)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def stated(drafter, rotary, embeddings, features):
    """Return what the statement says, shaped as `PosSDrafter.forward` does."""
    statement = Statement(drafter, rotary)
    outs = [torch.zeros_like(features[:, : LENGTH - 1 - s]) for s in range(DEPTH)]
    for row, (e, f) in enumerate(zip(embeddings, features, strict=True)):
        for root in range(1, LENGTH):
            path = e[root + 1 : root + DEPTH]
            for depth, x in enumerate(statement.drafted(e[: root + 1], f[:root], path)):
                outs[depth][row, root - 1] = x
    return outs


@pytest.mark.parametrize("family", [name for name in CONFIGS if "-" not in name])
def test_training_mode_is_the_statement(family):
    """Every family's heads: with norms and biases and without, and with the target's own rope."""
    model = tiny_model(family)
    drafter = random_drafter(model)
    embeddings, features = text(drafter)
    with torch.no_grad():
        outs = drafter(embeddings, features, DEPTH)
    expected = stated(drafter, model.base_model.rotary_emb, embeddings, features)
    torch.testing.assert_close(outs, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("layers", "positions_per_layer", "by_depth"),
    [(1, 1, [0] * 7), (6, 1, [0, 1, 2, 3, 4, 5, 5]), (3, 2, [0, 0, 1, 1, 2, 2, 2]),
     (2, 3, [0, 0, 0, 1, 1, 1, 1]), (2, 1, [0, 1, 1, 1, 1, 1, 1])],
)  # fmt: skip
def test_the_depth_alone_chooses_the_specialist(layers, positions_per_layer, by_depth):
    model = tiny_model("llama")
    drafter = random_drafter(model, layers=layers, positions_per_layer=positions_per_layer)
    assert [drafter.config.specialist_at(depth) for depth in range(7)] == by_depth
    embeddings, features = text(drafter)
    with torch.no_grad():
        outs = drafter(embeddings, features, DEPTH)
    expected = stated(drafter, model.base_model.rotary_emb, embeddings, features)
    torch.testing.assert_close(outs, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norms", [{"fc_norm": True}, {"norm_output": True}, BOTH_NORMS], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_eagle_31s_norms_in_training_mode(family, norms):
    model = tiny_model(family)
    drafter = random_drafter(model, layers=2, positions_per_layer=2, **norms)
    embeddings, features = text(drafter)
    with torch.no_grad():
        outs = drafter(embeddings, features, DEPTH)
    expected = stated(drafter, model.base_model.rotary_emb, embeddings, features)
    torch.testing.assert_close(outs, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depth", range(DEPTH))
@pytest.mark.parametrize("norms", [{}, BOTH_NORMS], ids=["plain", "norms"])
def test_each_depths_gradient_stays_in_its_own_specialist(norms, depth):
    drafter = random_drafter(tiny_model("qwen3"), layers=3, positions_per_layer=2, **norms)
    drafter(*text(drafter), DEPTH)[depth].pow(3).sum().backward()
    own = f"specialists.{drafter.config.specialist_at(depth)}."
    for name, parameter in drafter.named_parameters():
        learns = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert learns == name.startswith((own, "fc")), name


@given(st.integers(1, LENGTH - 1))
def test_later_text_is_invisible(changed):
    """The published programs let hidden keys into the softmax's denominator; here they are not."""
    drafter = random_drafter(tiny_model("qwen3"))
    embeddings, features = text(drafter)
    with torch.no_grad():
        before = drafter(embeddings, features, DEPTH)
        embeddings[:, changed:] += 100.0
        features[:, changed:] *= -100.0
        after = drafter(embeddings, features, DEPTH)
    for depth, (x, y) in enumerate(zip(before, after, strict=True)):
        kept = max(changed - 1 - depth, 0)  # roots whose whole path lies before the change
        assert torch.equal(x[:, :kept], y[:, :kept])
        assert not torch.equal(x[:, kept], y[:, kept])


@pytest.mark.parametrize("logits", [1, 2**18], ids=["a-request-a-block", "several"])
@pytest.mark.parametrize("length", [1, 127, 128, 300])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_path_attention_is_a_masked_softmax(monkeypatch, length, steps, logits):
    """And its gradient is autograd's."""
    monkeypatch.setattr(path, "_CACHED_LOGITS", logits)
    generator = torch.Generator().manual_seed(length)
    inputs = [
        torch.randn(2, length, *shape, 8, generator=generator, dtype=torch.float64)
        for shape in ((4,), (2,), (2,), (steps, 2), (steps, 2))
    ]
    q, k, v, k_own, v_own = (x.requires_grad_() for x in inputs)
    out = path_attention(q, k, v, k_own, v_own)
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    k_own, v_own = (x.repeat_interleave(2, 3) for x in (k_own, v_own))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k)
    logits = logits.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    logits = torch.cat([logits, torch.einsum("bqhd,bqshd->bhqs", q, k_own)], -1)
    weights = (logits * 8**-0.5).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights[..., :length], v)
    expected = expected + torch.einsum("bhqs,bqshd->bqhd", weights[..., length:], v_own)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    slope = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    found, right = (torch.autograd.grad(x, inputs, slope) for x in (out, expected))
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def test_a_folder_holds_the_drafter_alone(tmp_path):
    model = tiny_model("qwen3")
    drafter = random_drafter(model, layers=2, positions_per_layer=3, dtype=torch.float32)
    drafter.save_pretrained(tmp_path)
    loaded = PosSDrafter.from_pretrained(tmp_path)
    assert (loaded.config.target, loaded.config.layers) == ("tiny", 2)
    assert loaded.config.positions_per_layer == 3
    for (name, saved), again in zip(
        drafter.state_dict().items(), loaded.state_dict().values(), strict=True
    ):
        assert torch.equal(saved, again), name
        assert "embed" not in name
        assert "head" not in name
    loaded.config.check_target(model.config)
    with pytest.raises(ValueError, match="its hidden_size is 32, the target's is 64"):
        loaded.config.check_target(tiny_model("qwen3", hidden_size=64).config)


@pytest.mark.parametrize(
    "norms", [{}, {"fc_norm": True}, {"norm_output": True}, BOTH_NORMS], ids=str
)
def test_a_folder_holds_the_norms_that_are_on(tmp_path, norms):
    drafter = random_drafter(tiny_model("llama"), layers=2, dtype=torch.float32, **norms)
    drafter.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = {name for name in file.keys() if "fc_norm" in name or "output_norm" in name}  # noqa: SIM118
    expected = {"fc_norm.weight"} if norms.get("fc_norm") else set()
    if norms.get("norm_output"):
        expected |= {f"specialists.{layer}.output_norm.weight" for layer in range(2)}
    assert found == expected
    embeddings, features = text(drafter.double())
    again = PosSDrafter.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(again(embeddings, features, 3), drafter(embeddings, features, 3))

    # A configuration of before these norms says nothing of them: they are off.
    config = json.loads((tmp_path / "config.json").read_text())
    for name in BOTH_NORMS:
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not norms:
        old = PosSDrafter.from_pretrained(tmp_path, dtype=torch.float64)
        torch.testing.assert_close(old(embeddings, features, 3), drafter(embeddings, features, 3))
    else:
        with pytest.raises(ValueError, match="unexpected keys .*norm.weight"):
            PosSDrafter.from_pretrained(tmp_path)


def test_what_does_not_fit_is_refused():
    for name in ("layers", "positions_per_layer"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            PosSConfig(**{name: 0})
    with pytest.raises(ValueError, match="rope of type 'dynamic'"):
        PosSConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    drafter = random_drafter(tiny_model("llama"))
    embeddings, features = text(drafter)
    with pytest.raises(ValueError, match="features: expected shape"):
        drafter(embeddings, features[:, 1:], 1)
    for depth in (0, LENGTH):
        with pytest.raises(ValueError, match="depth: expected 1 to 8 for 9 tokens"):
            drafter(embeddings, features, depth)

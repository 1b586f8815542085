"""EAGLE-3's objective: a step against a plain loop; and what a new drafter begins as."""

import pytest
import torch
from torch import nn

from specattn.blocks import TORCH
from specattn.drafters import Eagle3Drafter
from specattn.drafters.eagle3 import fused, logits_of
from specattn.training import Eagle3Objective
from specattn.training.eagle3 import DECAY
from specattn.training.eagle3_start import _fit, start_from_target
from specattn.training.features import layer_features
from specattn.training.loss import IGNORED
from tests.decoding.models import VOCABULARY, tiny_model
from tests.drafters.eagle3_statement import NORMS, Statement, random_drafter

ROWS, LENGTH, DEPTH = 2, 8, 3


def batch(rows=ROWS, length=LENGTH, seed=4):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, 4] = IGNORED
    return ids[:, :-1], labels


def plain_loss(target, drafter, ids, labels):
    """Return the loss as the paper states it: one root at a time, all of its text read anew."""
    statement = Statement(drafter, target.base_model.rotary_emb)
    head, table = target.lm_head.weight, target.get_input_embeddings().weight
    total, items = 0.0, int((labels != IGNORED).sum())
    for row, labels_of_row in zip(ids, labels, strict=True):
        features, read = layer_features(target, row[None], drafter.config.feature_layers)
        embeds = table[row]
        for at in range(1, LENGTH):
            logits = head @ read[0, at]
            if labels_of_row[at] == IGNORED:
                continue
            if drafter.tokens is not None:
                if logits.argmax() not in drafter.tokens:
                    continue
                logits = logits[drafter.tokens]
            for step in range(min(DEPTH, at)):
                root = at - step
                path = list(embeds[root + 1 : at + 1])
                x = statement.drafted(list(embeds[: root + 1]), list(features[0, :root]), path)
                drafted = statement.logits(x[step]).log_softmax(0)
                total = total - DECAY**step * (logits.softmax(0) * drafted).sum()
    return total / (items * sum(DECAY**step for step in range(DEPTH)))


@pytest.mark.parametrize("tokens", [None, 40], ids=["whole", "reduced"])
@pytest.mark.parametrize("norms", ["plain", "eagle-3.1"])
def test_a_step_is_the_papers(norms, tokens):
    """And its gradient reaches all but the head, through every step."""
    target = tiny_model("qwen3", peak=1.0).double()
    drafter = random_drafter(target, tokens=tokens, **NORMS[norms])
    known = target.lm_head.weight if tokens is None else target.lm_head.weight[drafter.tokens]
    drafter.lm_head.weight.data.copy_(known)
    ids, labels = batch()
    found = Eagle3Objective(target, drafter, depth=DEPTH)(ids, labels)
    torch.testing.assert_close(found["loss"], plain_loss(target, drafter, ids, labels))
    found["loss"].backward()
    for name, parameter in drafter.named_parameters():
        learns = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert learns == (name != "lm_head.weight"), name


def test_a_drafter_learns():
    target = tiny_model("llama", peak=1.0)
    drafter = random_drafter(target, dtype=torch.float32).train()
    rows, _ = batch(8, 24)
    start_from_target(drafter, target, rows)
    objective = Eagle3Objective(target, drafter, depth=2)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=3e-3), []
    for _ in range(40):
        loss = objective(rows[:, :-1], rows[:, 1:])["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_new_drafter_begins_as_the_targets_last_layer(family):
    target = tiny_model(family)
    depth = target.config.num_hidden_layers
    drafter = Eagle3Drafter.for_target(
        target, target="tiny", feature_layers=(1, depth), token_heads=2
    )
    rows, _ = batch(12, 24)
    start_from_target(drafter, target, rows)

    # fc finds the stream behind the last layer, which is among the features: so a head that is the
    # target's says the target's next token of g.
    features, read = layer_features(target, rows, (1, depth))
    with torch.no_grad():
        g = fused(TORCH, drafter, features)
        torch.testing.assert_close(g, features[..., 32:], rtol=0.05, atol=0.05)
        torch.testing.assert_close(
            logits_of(TORCH, drafter, features[..., 32:]),
            target.lm_head(read),
            rtol=1e-4,
            atol=1e-4,
        )

    # Heads beside the target's add what the last layer reads and g has not, of a pair by itself.
    with torch.no_grad():
        fit = _fit(drafter, target, list(rows))
    own = drafter.midlayer.self_attn
    q_heads, kv_heads, size = 4, 2, 16
    value = own.v_proj.weight[kv_heads * size :].unflatten(0, (2, size))
    out = own.o_proj.weight[:, q_heads * size :].unflatten(1, (2, 2, size))
    added = torch.einsum("ohgd,hdx->ox", out, value)
    torch.testing.assert_close(added, fit.rest.float(), rtol=1e-3, atol=1e-4)

    # The others read the stream in its two parts; the MLP is the layer's own.
    layer = target.base_model.layers[-1]
    pair = torch.randn(5, 64)
    stream = (pair.double() @ fit.whole.T / fit.size).float() * layer.input_layernorm.weight
    for mine, theirs in ((own.q_proj, layer.self_attn.q_proj), (own.k_proj, layer.self_attn.k_proj),
                         (own.v_proj, layer.self_attn.v_proj)):  # fmt: skip
        found = mine(pair)[:, : theirs.out_features]
        torch.testing.assert_close(found, theirs(stream), rtol=1e-3, atol=1e-4)
    if isinstance(getattr(layer.mlp, "gate_proj", None), nn.Linear):
        assert torch.equal(drafter.midlayer.mlp["gate_proj"].weight, layer.mlp.gate_proj.weight)


def test_a_reduced_vocabulary_is_what_is_frequent():
    target = tiny_model("llama")
    drafter = Eagle3Drafter.for_target(
        target, target="tiny", feature_layers=(1, 3), draft_vocab_size=3
    )
    rows = torch.tensor([[7, 7, 7, 50, 50, 9, 9, 9, 9, 3]])
    start_from_target(drafter, target, rows)
    assert drafter.tokens.tolist() == [7, 9, 50]
    assert torch.equal(drafter.lm_head.weight, target.lm_head.weight[[7, 9, 50]])

"""DFlash's objective: a step against a block at a time, stated plainly; and that a head learns."""

import pytest
import torch
import torch.nn.functional as F

from specattn.decoding import DFlash, JetFlow, generate
from specattn.training import DFlashObjective, DFlashRecipe
from specattn.training.dflash import spread
from specattn.training.dflash_start import start_from_target
from specattn.training.features import layer_features
from specattn.training.loss import IGNORED
from tests import covering
from tests.decoding.models import tiny_model
from tests.drafters.dflash_statement import SIZE, random_drafter, stated

V, ROWS, LENGTH = 6, 2, 9


def batch(rows=ROWS, length=LENGTH, seed=4):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (rows, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, 4] = IGNORED
    return ids[:, :-1], labels


@torch.no_grad()
def plain_loss(target, drafter, ids, labels):
    """Return the loss as the papers state it, of blocks behind every token there is one of."""
    table, rotary = target.get_input_embeddings().weight, target.base_model.rotary_emb
    total = whole = 0.0
    for row, labels_of_row in zip(ids, labels, strict=True):
        features, read = layer_features(target, row[None], drafter.config.feature_layers)
        for anchor in range(1, LENGTH - SIZE + 2):
            block = torch.tensor([int(row[anchor]), *[V - 1] * (SIZE - 1)])
            rows = stated(drafter, rotary, features[0, :anchor], list(table[block]))
            for at in range(1, SIZE):
                place = anchor + at - 1
                if labels_of_row[place] == IGNORED:
                    continue
                drafted = target.lm_head(rows[at]).log_softmax(0)
                if drafter.config.causal:
                    theirs, weight = target.lm_head(read[0, place]).softmax(0), 1.0
                else:
                    theirs = torch.eye(V, dtype=drafted.dtype)[labels_of_row[place]]
                    weight = float(torch.tensor(-(at - 1) / (7 * SIZE / 16)).double().exp())
                total, whole = total - weight * (theirs * drafted).sum(), whole + weight
    return total / whole


@covering.each("family, causal", ["llama", "qwen3"], [False, True])
def test_a_step_is_the_papers(family, causal):
    """With an anchor at every place; and its gradient reaches all weights."""
    target = tiny_model(family, vocab_size=V, peak=1.0).double()
    drafter = random_drafter(target, dtype=torch.float64, causal=causal)
    ids, labels = batch()
    found = DFlashObjective(target, drafter)(ids, labels)
    expected = plain_loss(target, drafter, ids, labels)
    torch.testing.assert_close(found["loss"], expected, rtol=1e-6, atol=1e-6)
    # Passes of a step are divided by all of its labels.
    half = DFlashObjective(target, drafter)(ids, labels, num_items_in_batch=2 * ROWS * LENGTH - 2)
    torch.testing.assert_close(2 * half["loss"], found["loss"])
    found["loss"].backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.abs().sum() > 0), name


def test_anchors_are_drawn_anew_where_it_learns_and_not_where_it_is_judged():
    target = tiny_model("qwen3", vocab_size=V)
    objective = DFlashObjective(target, random_drafter(target), anchors=4)
    ids, _ = batch(3, 40)
    drawn = [objective.train()._anchors(ids, SIZE) for _ in range(2)]
    assert not torch.equal(*drawn)
    for anchors in drawn:
        assert anchors.shape == (3, 4)
        assert anchors.min() >= 1
        assert anchors.max() <= 40 - SIZE + 1
        assert all(len(set(row)) == 4 for row in anchors.tolist())
    judged = [objective.eval()._anchors(ids, SIZE) for _ in range(2)]
    assert judged[0].tolist() == judged[1].tolist() == [[1, 10, 19, 28]] * 3


@pytest.mark.parametrize(
    "causal",
    [
        pytest.param(False, id="bidirectional"),
        pytest.param(True, id="causal", marks=pytest.mark.slow),
    ],
)
def test_a_drafter_learns_and_more_is_accepted(causal):
    torch.manual_seed(0)
    target = tiny_model("qwen3", vocab_size=V, peak=1.0)
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([4, 0])]
    texts = generate(target, prompts * 4, "plain", max_new_tokens=48, seed=0, temperature=1.0)
    rows = torch.stack([ids[:48] for ids in texts.sequences])
    recipe = DFlashRecipe(causal=causal, layers=2, block_size=SIZE)
    drafter = recipe.new_drafter(target, "tiny").train()
    fresh = recipe.new_drafter(target, "tiny").eval()
    assert drafter.config.feature_layers == [1, 2, 3]
    objective = recipe.objective(target, drafter)
    optimizer, losses = torch.optim.AdamW(drafter.parameters(), lr=1e-2), []
    for _ in range(60):
        loss = objective(rows[:, :-1], rows[:, 1:])["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    lengths = []
    for one in (fresh, drafter.eval()):
        method = (JetFlow if causal else DFlash)(one, total_tokens=16)
        output = generate(target, prompts, method, max_new_tokens=60)
        lengths.append(output.statistics.total.mean_acceptance_length)
    assert lengths[1] > lengths[0] + 0.2


@covering.each("family, causal", ["qwen3", "qwen2"], [False, True])
def test_a_new_drafter_is_layers_of_the_target(family, causal):
    """Which read blocks as they read texts; of these c gives keys and values like theirs."""
    target = tiny_model(family, vocab_size=V, peak=1.0)
    texts = torch.randint(V, (8, 40), generator=torch.Generator().manual_seed(3))
    drafter = DFlashRecipe(causal=causal, layers=2).new_drafter(target, "tiny")
    start_from_target(drafter, target, texts)
    layers, embeds = target.model.layers, target.model.embed_tokens(texts[:1])
    for own, theirs in zip(drafter.layers, (layers[0], layers[2]), strict=True):
        normed = own.input_layernorm(embeds)
        for name in ("q_proj", "k_proj", "v_proj"):
            expected = getattr(theirs.self_attn, name)(theirs.input_layernorm(embeds))
            torch.testing.assert_close(getattr(own.self_attn, name)(normed), expected)
        stream = theirs.post_attention_layernorm(embeds)
        inner = own.post_attention_layernorm(embeds)
        mlp = own.mlp
        found = mlp.down_proj(F.silu(mlp.gate_proj(inner)) * mlp.up_proj(inner))
        torch.testing.assert_close(found, theirs.mlp(stream))
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)

    def missed(weight):
        """Return how far keys and values of c, normed, are from the target's."""
        total = 0.0
        for row in texts:
            features, _ = layer_features(target, row[None], (*drafter.config.feature_layers, 2))
            c = drafter.hidden_norm(features[0, :, :-32] @ weight.T)
            reads = target.model.embed_tokens(row), features[0, :, -32:]
            for own, theirs, read in zip(
                drafter.layers, (layers[0], layers[2]), reads, strict=True
            ):
                for name in ("k_proj", "v_proj"):
                    expected = getattr(theirs.self_attn, name)(theirs.input_layernorm(read))
                    total += (getattr(own.self_attn, name)(c) - expected).square().sum()
        return float(total)

    with torch.no_grad():
        found, generator = missed(drafter.fc.weight), torch.Generator().manual_seed(0)
        for _ in range(3):
            noise = torch.randn(drafter.fc.weight.shape, generator=generator)
            assert missed(drafter.fc.weight + 0.1 * drafter.fc.weight.std() * noise) > found


def test_layers_are_spread():
    assert spread(36) == [2, 10, 18, 26, 34]
    assert (spread(3), spread(1), spread(8)) == ([1, 2, 3], [1], [2, 3, 4, 5, 6])


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_what_cannot_be_trained_is_refused(causal):
    target = tiny_model("qwen3", vocab_size=V)
    drafter = random_drafter(target, causal=causal)
    with pytest.raises(ValueError, match="rows of 4 tokens are shorter than a block of 5"):
        DFlashObjective(target, drafter)(*(x[:, :4] for x in batch()))
    with pytest.raises(ValueError, match="anchors must be at least 1, got 0"):
        DFlashObjective(target, drafter, anchors=0)
    with pytest.raises(ValueError, match=f"causal: {not causal}, the drafter has {causal}"):
        DFlashRecipe(causal=not causal).objective(target, drafter)

"""The objective of decoding heads: which token each is asked for, and what is logged of it."""

import pytest
import torch
import torch.nn.functional as F

from specattn.drafters import MedusaHeads, TokenSwiftHeads
from specattn.training import HeadsObjective, MedusaRecipe, TokenSwiftRecipe
from specattn.training.heads import MEDUSA_DECAY, TABLE_9, TRAINER_DEFAULTS
from specattn.training.loss import IGNORED
from tests.decoding.models import CONFIGS, VOCABULARY, tiny_model
from tests.drafters.test_heads import random_heads

ROWS, LENGTH = 2, 12


def batch(rows=ROWS, length=LENGTH):
    ids = torch.randint(VOCABULARY, (rows, length + 1))
    return ids[:, :-1], ids[:, 1:].clone()


def stated(target, drafter, ids, labels):
    """Return each head's cross entropies and hits, token by token."""
    logits_of = target.get_output_embeddings()
    with torch.no_grad():
        hidden = drafter(target.base_model(ids).last_hidden_state)
        losses, hits = [[] for _ in range(3)], [[] for _ in range(3)]
        for row in range(len(ids)):
            for t in range(ids.shape[1]):
                for i in range(1, 4):
                    # Head i at token t speaks of token t + 1 + i, and labels are one ahead.
                    if t + i < ids.shape[1] and labels[row, t + i] != IGNORED:
                        logits = logits_of(hidden[row, t, i - 1])
                        losses[i - 1].append(F.cross_entropy(logits, labels[row, t + i]))
                        hits[i - 1].append((logits.argmax() == labels[row, t + i]).float())
    return [torch.stack(x) for x in losses], [torch.stack(x) for x in hits]


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_head_learns_the_token_it_is_asked_for(family, decay):
    target = tiny_model(family, peak=1.0)
    drafter = random_heads("tokenswift", target, scale=0.1, dtype=torch.float32)
    ids, labels = batch()
    labels[0, 3:5] = IGNORED
    losses, hits = stated(target, drafter, ids, labels)
    found = HeadsObjective(target, drafter, decay=decay).eval()(ids, labels, 7)
    expected = sum(decay**i * loss.sum() for i, loss in enumerate(losses)) / 7
    torch.testing.assert_close(found["loss"], expected)
    for i in range(3):
        torch.testing.assert_close(found[f"loss_{i + 1}"], losses[i].mean())
        torch.testing.assert_close(found[f"accuracy_{i + 1}"], hits[i].mean())


def test_the_target_stands_still():
    target = tiny_model("qwen3", peak=1.0)
    objective = HeadsObjective(target, random_heads("medusa", target, dtype=torch.float32))
    objective.train()
    assert not target.training
    objective(*batch())["loss"].backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in objective.drafter.parameters())


def test_presets_are_table_9():
    assert (TABLE_9.row_length, TABLE_9.batch_size, TABLE_9.learning_rate) == (8192, 120, 5e-3)
    stated = {"max_steps": 200, "warmup_steps": 50, "weight_decay": 0.1}
    assert stated.items() <= TRAINER_DEFAULTS.items()
    assert (TRAINER_DEFAULTS["adam_beta1"], TRAINER_DEFAULTS["adam_beta2"]) == (0.9, 0.999)


@pytest.mark.parametrize(
    ("recipe", "kind", "decay"),
    [(TokenSwiftRecipe, TokenSwiftHeads, 1.0), (MedusaRecipe, MedusaHeads, MEDUSA_DECAY)],
)
def test_recipes(recipe, kind, decay):
    target = tiny_model("llama")
    drafter = recipe(num_heads=2).new_drafter(target, "org/name")
    assert type(drafter) is kind
    assert (drafter.config.num_heads, drafter.config.target) == (2, "org/name")
    assert recipe().objective(target, drafter).decay == decay

"""What holds for models whose layers remember something else than keys and values."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList

from specattn.decoding import METHODS, Target, generate, prove
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.decoding.model.model import Model
from specattn.decoding.passes.cached_model import new_cache
from tests.decoding.models import greedy_by_transformers, prompts
from tests.decoding.settings import settings_without_layers

NEW_TOKENS = 20
LENGTHS = (5, 23, 40)


def check_repetition(model, compile):
    """What was generated before is looked up, so that long paths of trees are accepted."""
    texts = prompts(LENGTHS)
    expected = [greedy_by_transformers(model, text, NEW_TOKENS) for text in texts]
    method = METHODS["suffix"](nodes=6, depth=4, k=3, remember=True)
    for _ in range(2):
        output = generate(model, texts, method, max_new_tokens=NEW_TOKENS, compile=compile)
        assert output.new_tokens == expected
    assert output.statistics.total.mean_acceptance_length > 2


def check_early_end(model, texts, expected):
    """A request that ends early leaves the others alone."""
    end = expected[0][3]
    cut = [new[: new.index(end) + 1] if end in new else new for new in expected]
    assert len({len(new) for new in cut}) > 1, "one should end earlier"
    methods = settings_without_layers(model)
    for name in ("plain", "vegas", "token_recycling"):
        output = generate(model, texts, methods[name], max_new_tokens=NEW_TOKENS, eos_token_id=end)
        assert output.new_tokens == cut


def check_seed(model):
    """A seed decides the text, whatever is drafted."""
    texts, methods = prompts([9, 17]), settings_without_layers(model)
    options = {"max_new_tokens": 12, "do_sample": True, "seed": 3}
    expected = generate(model, texts, "plain", **options).new_tokens
    for name in ("suffix", "token_recycling", "vegas"):
        assert generate(model, texts, methods[name], **options).new_tokens == expected


def check_snapshot(model, lengths):
    """Runs from a snapshot begin with what the prompt left, whoever ran before."""
    texts, methods = prompts(lengths), settings_without_layers(model)
    expected = [greedy_by_transformers(model, text, 8) for text in texts]
    snapshot = PromptSnapshot(Target(model, len(texts), 60), texts)
    for name in ("vegas", "plain", "suffix", "plain"):
        run = snapshot.run(methods[name], 8, LogitsProcessorList(), do_sample=False, seed=0)
        assert run[0] == expected
    snapshot.restore()
    ids = torch.stack(texts)
    for _ in range(2):  # what transformers was given is not what it changes
        run = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=snapshot.as_dynamic_cache(),
            max_new_tokens=8,
            do_sample=False,
        )
        assert run[:, ids.shape[1] :].tolist() == expected


def check_model_by_itself(model, projection):
    """A model decodes by itself as before, and so do its copies with weights of their own.

    ``projection(layer)`` is a linear layer of the first layer, without which texts differ.
    """
    (text,) = prompts([20])
    with torch.no_grad():
        before, saved = model(text[None]).logits, set(model.state_dict())
        prove(model)
        assert torch.equal(model(text[None]).logits, before)
    assert set(model.state_dict()) == saved
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.nn.init.zeros_(projection(other.model.layers[0]).weight)
        changed = greedy_by_transformers(other, text, 6)
        assert generate(other, text, "plain", max_new_tokens=6).new_tokens == [changed]
        assert changed != greedy_by_transformers(model, text, 6)


def check_changed_weights(model, projections):
    """Weights that change, of these linear layers, are read anew."""
    (text,) = prompts([20])
    for scale in (1.0, -1.0):
        with torch.no_grad():
            for projection in projections:
                projection.weight.mul_(scale)
        output = generate(model, text, "plain", max_new_tokens=6, compile="on")
        assert output.new_tokens == [greedy_by_transformers(model, text, 6)]


def check_ranks_refused(model, kept, monkeypatch):
    """Ranks share what layers keep (so named) in no way, and the model's weights in none."""
    kind, ranks = model.config.model_type, SimpleNamespace(context=object(), heads=lambda *x: x)
    with pytest.raises(ValueError, match=f"'{kind}' keep {kept}, which ranks do not share"):
        Target(model, 1, 8, lockstep=ranks)
    monkeypatch.setattr(Model, "ranks_of", lambda model: ranks)
    with pytest.raises(ValueError, match=f"'{kind}' are not divided over ranks yet"):
        new_cache(model, 1, 8)

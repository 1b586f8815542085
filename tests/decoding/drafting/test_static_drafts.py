"""What trained drafters draft by kernel calls alone against what their modules draft."""

from itertools import product

import pytest
import torch

from specattn.decoding import LongSpec, Medusa, PosS, TokenSwift, generate
from tests.decoding.models import prompts, tiny_model
from tests.drafters import poss_statement, statement
from tests.drafters.test_heads import random_heads

pytest.importorskip("specattn._cpu")
# What caches hold beyond what was written is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

VOCABULARY = 24


def longspec(model, **options):
    drafter = statement.random_drafter(model, window=7, seed=3, dtype=torch.float32)
    return LongSpec(drafter, **options)


def poss(model, layers=3, positions_per_layer=1, norms=None, **options):
    shape = {"layers": layers, "positions_per_layer": positions_per_layer, **(norms or {})}
    drafter = poss_statement.random_drafter(model, seed=3, dtype=torch.float32, **shape)
    return PosS(drafter, **options)


def heads(kind, method, model, **options):
    return method(random_heads(kind, model, dtype=torch.float32), **options)


METHODS = {
    "longspec-tree": lambda model: longspec(model, widths=(3, 5, 4)),
    "longspec-nodes": lambda model: longspec(model, nodes=6, widths=(5, 7, 7)),
    "longspec-chain": lambda model: longspec(model, gamma=4),
    "longspec-rejection": lambda model: longspec(model, gamma=3, rejection=True),
    "poss": lambda model: poss(model, width=4, depth=4, total_tokens=20),
    "poss-5-layers": lambda model: poss(model, 5, width=3, depth=6, total_tokens=90),
    "poss-1-layer": lambda model: poss(model, 1, width=2, depth=3, total_tokens=6, window=3),
    "poss-norms": lambda model: poss(
        model, norms=poss_statement.BOTH_NORMS, width=4, depth=4, total_tokens=20
    ),
    "poss-whole-vocabulary": lambda model: poss(model, width=VOCABULARY, depth=2, total_tokens=70),
    "medusa": lambda model: heads("medusa", Medusa, model, widths=(3, 1, 4)),
    "tokenswift": lambda model: heads("tokenswift", TokenSwift, model, widths=(1, 2, 3), budget=12,
                                      sinks=2),
}  # fmt: skip


def drafts(monkeypatch, method, *arguments, **options):
    """Return the new tokens of a run, and per round and request the paths that it drafted."""
    rounds = []
    start = type(method).start

    def noting(self, context):
        drafter = start(self, context)
        propose = drafter.propose

        def noted(root):
            draft = propose(root)
            tree = draft.tree.paths.expand(len(root), -1, -1)
            tokens = draft.tokens.clone()
            rounds.append([
                {tuple(own[n].item() for n in path if n >= 0) for path in paths}
                for own, paths in zip(tokens, tree, strict=True)
            ])  # fmt: skip
            return draft

        drafter.propose = noted
        return drafter

    with monkeypatch.context() as patch:
        patch.setattr(type(method), "start", noting)
        output = generate(*arguments[:1], *arguments[1:], method, **options)
    return output.new_tokens, rounds


@pytest.mark.parametrize("compile", ["on", "off"])
@pytest.mark.parametrize("nodes", [1, 5, 9])
def test_levels_as_wide_as_the_nodes_miss_no_path(monkeypatch, nodes, compile):
    """Against levels that hold every path of two tokens over the vocabulary."""
    model = tiny_model("qwen3", vocab_size=VOCABULARY)
    texts = prompts([5, 23], vocabulary=VOCABULARY)
    options = {"max_new_tokens": 10, "temperature": 0, "compile": compile}
    found, expected = [
        drafts(monkeypatch, longspec(model, nodes=nodes, widths=widths), model, texts, **options)
        for widths in [(nodes, nodes), (VOCABULARY, VOCABULARY**2)]
    ]
    assert found == expected
    assert all(len(paths) == 1 + nodes for one in found[1][:3] for paths in one)


def cases():
    """Yield methods by family, greedy and sampled; one of each kind of drafter in all is quick."""
    for name, family, sampled in product(
        METHODS, ("qwen3", "qwen2", "mistral-sliding"), (False, True)
    ):
        quick = name in ("longspec-tree", "poss", "medusa") and not sampled
        marks = () if quick or family == "qwen3" else pytest.mark.slow
        yield pytest.param(name, family, sampled, marks=marks)


@pytest.mark.parametrize(("name", "family", "sampled"), list(cases()))
def test_both_draft_the_same(monkeypatch, name, family, sampled):
    """Round by round, of texts that end one after the other, one of them without a pair."""
    model = tiny_model(family, vocab_size=VOCABULARY)
    texts = prompts([5, 23, 1], vocabulary=VOCABULARY)
    options = {"max_new_tokens": 14, "seed": 5, "temperature": 0.8 * sampled}
    method = METHODS[name](model)
    found, expected = [
        drafts(monkeypatch, method, model, texts, compile=compile, **options)
        for compile in ("on", "off")
    ]
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert max(len(paths) for one in found[1] for paths in one) > 3

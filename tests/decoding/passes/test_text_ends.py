"""Drafts of a given size near a text's end: cut from the graph of the whole, not captured anew."""

from unittest import mock

import pytest
import torch

import specattn
from specattn.blocks import Replayed
from specattn.blocks import programs as blocks
from specattn.decoding import LongSpec, Quest, Streaming, TokenSwift, generate
from specattn.decoding.engine.target import Target
from tests.decoding.models import prompts, tiny_model
from tests.decoding.passes.test_shrinking_batch import METHODS, by_kernels, by_modules
from tests.decoding.settings import settings_of
from tests.drafters import statement
from tests.drafters.test_heads import random_heads

DRAFTS = METHODS | {
    "mtp": lambda model: settings_of(model)["mtp"],
    "longspec": lambda model: LongSpec(
        statement.random_drafter(model, window=9, dtype=torch.float32), widths=(2, 3, 2)
    ),
    "tokenswift": lambda model: TokenSwift(
        random_heads("tokenswift", model, dtype=torch.float32), (1, 2, 2), k=0, budget=10, sinks=2
    ),
    "quest": lambda model: Quest(gamma=3, budget=4, min_tokens=4, page_size=4),
    "streaming": lambda model: Streaming(gamma=3, budget=4, min_tokens=4, sinks=2),
}
PROGRAMS = {
    **dict.fromkeys(("eagle3", "poss", "mtp", "longspec", "longspec chain"), "_grow"),
    **{"medusa": "_best", "tokenswift": "_logits"},
    **dict.fromkeys(("vegas", "quest", "streaming"), "_chain"),
}
FEW = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
NEW, SLOW = 12, pytest.mark.slow


def captures(name, monkeypatch, temperature=0.0, new=NEW):
    """Return how many graphs of the draft's program a run has captured, and levels of its drafts.

    The text is that of passes that are not captured.
    """
    chained = PROGRAMS[name] == "_chain"
    model, graphs, depths, made = tiny_model("llama", **(FEW if chained else {})), [], [], []
    method, texts = DRAFTS[name](model), prompts([5])
    options = {"max_new_tokens": new, "temperature": temperature, "seed": 3}
    options["do_sample"] = temperature > 0
    expected = generate(model, texts, method, compile="off", **options).new_tokens
    verify, run_as = Target.verify, Replayed.run_as

    def noting(target, tree, tokens, **how):
        depths.append(tree.max_depth)
        return verify(target, tree, tokens, **how)

    def noted(passes, size, key, program, inputs):
        before = len(graphs)
        found = run_as(passes, size, key, program, inputs)
        if len(graphs) > before:
            made.append(getattr(program, "func", program).__name__)
        return found

    def runner(target, of):
        return (by_kernels if chained else by_modules)(target if of is target else of, graphs)

    with (
        mock.patch.object(Target, "verify", noting),
        mock.patch.object(Replayed, "run_as", noted),
        mock.patch.object(Target, "_runner", runner),
    ):
        assert generate(model, texts, method, **options).new_tokens == expected
    return made.count(PROGRAMS[name]), depths


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", [one for one in PROGRAMS if PROGRAMS[one] != "_chain"])
def test_a_draft_is_cut_from_the_graph_of_the_whole(name, temperature, monkeypatch):
    count, depths = captures(name, monkeypatch, temperature)
    assert len(set(depths)) > 2 or max(depths) == 2
    assert count == 1


@pytest.mark.skipif(specattn.backends()["triton"] != "available", reason="needs Triton")
@pytest.mark.parametrize(
    ("name", "new"),  # of which a last draft has use for fewer
    [
        ("quest", 13),
        *(pytest.param(*one, marks=SLOW) for one in (("vegas", 11), ("streaming", 13))),
    ],
)
def test_a_chain_is_cut_from_the_graph_of_the_whole(name, new, monkeypatch):
    """One of a selection, and one whose steps choose what they read, of which memory moves."""
    count, depths = captures(name, monkeypatch, new=new)
    assert len(set(depths) - {0}) > 1
    assert count == 1


def test_a_depth_is_captured_once_cutting_has_taken_as_long(monkeypatch):
    """Drafts of a method that serves many short texts end often."""
    monkeypatch.setattr(blocks, "_CAPTURE", 0)
    count, depths = captures("eagle3", monkeypatch)
    assert count == len(set(depths) - {0})

"""Every method in settings that are small enough for tiny models, trained drafters random."""

import torch

from specattn.decoding import (
    LongSpec,
    Medusa,
    Plain,
    PosS,
    PromptLookup,
    Quest,
    SpecExtend,
    Streaming,
    TokenRecycling,
    TokenSwift,
    TriForce,
    Vegas,
)
from tests.decoding.models import tiny_model
from tests.drafters import poss_statement
from tests.drafters.statement import random_drafter
from tests.drafters.test_heads import random_heads


def settings_of(model):
    """Return a method of every kind for a model, by name."""
    heads = {name: random_heads(name, model, dtype=torch.float32) for name in HEADS}
    longspec = random_drafter(model, window=7, dtype=torch.float32)
    specialists = poss_statement.random_drafter(model, layers=2, dtype=torch.float32)
    small = tiny_model("llama", vocab_size=model.config.vocab_size, seed=9, num_hidden_layers=1)
    share = {"gamma": 3, "ratio": 0.5, "min_tokens": 2}
    return {
        "plain": Plain(),
        "vegas": Vegas(**share, switch=False),
        "vegas-last-weight": Vegas(**share, rows="last", ranking="weight", switch=False),
        "streaming": Streaming(**share, sinks=2),
        "quest": Quest(**share, page_size=4),
        "specextend": SpecExtend(**share, chunk_size=4),
        "triforce": TriForce(**share, chunk_size=4),
        "triforce-hierarchy": TriForce(
            **share, chunk_size=4, draft=small, draft_gamma=2, draft_budget=20
        ),
        "prompt_lookup": PromptLookup(gamma=4),
        "token_recycling": TokenRecycling(nodes=7, depth=3, k=3),
        "medusa": Medusa(heads["medusa"], widths=(3, 2)),
        "tokenswift": TokenSwift(heads["tokenswift"], (1, 2, 2), k=4, n=3, budget=10, sinks=2),
        "tokenswift-static": TokenSwift(
            heads["tokenswift"], (1, 2, 2), k=4, n=3, budget=10, sinks=2, dynamic=False
        ),
        "longspec-tree": LongSpec(longspec, widths=(2, 3, 3)),
        "longspec-chain": LongSpec(longspec, gamma=3),
        "poss": PosS(specialists, width=3, depth=3, total_tokens=8),
    }


HEADS = ("medusa", "tokenswift")
NAMES = tuple(settings_of(tiny_model("qwen3")))

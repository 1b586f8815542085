"""Every method in settings that are small enough for tiny models, trained drafters random."""

import torch

from specattn.decoding import METHODS as ALL
from tests.decoding.models import tiny_model
from tests.decoding.mtp_folders import random_drafter as random_mtp
from tests.drafters import dflash_statement, eagle3_statement, poss_statement
from tests.drafters.statement import random_drafter
from tests.drafters.test_heads import random_heads


def settings_of(model):
    """Return a method of every kind for a model, by name."""
    longspec = random_drafter(model, window=7, dtype=torch.float32)
    specialists = poss_statement.random_drafter(model, layers=2, dtype=torch.float32)
    eagle3 = eagle3_statement.random_drafter(
        model, tokens=model.config.vocab_size * 3 // 4, dtype=torch.float32
    )
    return {
        **settings_without_layers(model),
        "auto": ALL["auto"](trained=ALL["longspec"](longspec, widths=(2, 3))),
        "longspec-tree": ALL["longspec"](longspec, widths=(2, 3, 3)),
        "longspec-chain": ALL["longspec"](longspec, gamma=3),
        "poss": ALL["poss"](specialists, width=3, depth=3, total_tokens=8),
        "eagle3": ALL["eagle3"](eagle3, width=3, depth=3, total_tokens=8),
        "dflash": ALL["dflash"](
            dflash_statement.random_drafter(model, causal=False), width=3, depth=3, total_tokens=8
        ),
        "jetflow": ALL["jetflow"](
            dflash_statement.random_drafter(model, causal=True), width=3, depth=3, total_tokens=8
        ),
        "mtp": ALL["mtp"](random_mtp(model), width=3, depth=3, total_tokens=8),
    }


def settings_without_layers(model):
    """Return those whose drafter has no layer shaped as the model's: some layers have no such."""
    heads = {name: random_heads(name, model, dtype=torch.float32) for name in HEADS}
    medusa = ALL["medusa"](heads["medusa"], widths=(3, 2))
    small = tiny_model("llama", vocab_size=model.config.vocab_size, seed=9, num_hidden_layers=1)
    share = {"gamma": 3, "ratio": 0.5, "min_tokens": 2}
    return {
        "plain": ALL["plain"](),
        "vegas": ALL["vegas"](**share, switch=False),
        "vegas-last-weight": ALL["vegas"](**share, rows="last", ranking="weight", switch=False),
        "cast": ALL["cast"](gamma=3),
        "streaming": ALL["streaming"](**share, sinks=2),
        "quest": ALL["quest"](**share, page_size=4),
        "specextend": ALL["specextend"](**share, chunk_size=4),
        "triforce": ALL["triforce"](**share, chunk_size=4),
        "triforce-hierarchy": ALL["triforce"](
            **share, chunk_size=4, draft=small, draft_gamma=2, draft_budget=20
        ),
        "prompt_lookup": ALL["prompt_lookup"](gamma=4),
        "suffix": ALL["suffix"](nodes=6, depth=4, k=3),
        "suffix-sized": ALL["suffix"](),
        "auto": ALL["auto"](trained=medusa),
        "token_recycling": ALL["token_recycling"](nodes=7, depth=3, k=3),
        "medusa": medusa,
        "tokenswift": ALL["tokenswift"](
            heads["tokenswift"], (1, 2, 2), k=4, n=3, budget=10, sinks=2
        ),
        "tokenswift-static": ALL["tokenswift"](
            heads["tokenswift"], (1, 2, 2), k=4, n=3, budget=10, sinks=2, dynamic=False
        ),
    }


HEADS = ("medusa", "tokenswift")
NAMES = tuple(settings_of(tiny_model("qwen3")))

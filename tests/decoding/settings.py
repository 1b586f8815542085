"""Every method in settings that are small enough for tiny models, trained drafters random."""

from collections.abc import Mapping
from functools import cache

import torch

from specattn.decoding import METHODS as ALL
from tests.decoding.models import tiny_model
from tests.decoding.mtp_folders import random_drafter as random_mtp
from tests.drafters import dflash_statement, eagle3_statement, poss_statement
from tests.drafters.statement import random_drafter
from tests.drafters.test_heads import random_heads

SMALL = {"width": 3, "depth": 3, "total_tokens": 8}


class Settings(Mapping):
    """Methods by name, each made when it is first asked for: most tests want one of them."""

    def __init__(self, makers):
        self._makers, self._made = makers, {}

    def __getitem__(self, name):
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self):
        return iter(self._makers)

    def __len__(self):
        return len(self._makers)


def settings_of(model):
    """Return a method of every kind for a model, by name."""
    longspec = cache(lambda: random_drafter(model, window=7, dtype=torch.float32))

    def poss():
        specialists = poss_statement.random_drafter(model, layers=2, dtype=torch.float32)
        return ALL["poss"](specialists, **SMALL)

    def eagle3():
        tokens = model.config.vocab_size * 3 // 4
        drafter = eagle3_statement.random_drafter(model, tokens=tokens, dtype=torch.float32)
        return ALL["eagle3"](drafter, **SMALL)

    def dflash(name, causal):
        return ALL[name](dflash_statement.random_drafter(model, causal=causal), **SMALL)

    return Settings(
        {
            **_without_layers(model),
            "auto": lambda: ALL["auto"](trained=ALL["longspec"](longspec(), widths=(2, 3))),
            "longspec-tree": lambda: ALL["longspec"](longspec(), widths=(2, 3, 3)),
            "longspec-chain": lambda: ALL["longspec"](longspec(), gamma=3),
            "poss": poss,
            "eagle3": eagle3,
            "dflash": lambda: dflash("dflash", causal=False),
            "jetflow": lambda: dflash("jetflow", causal=True),
            "mtp": lambda: ALL["mtp"](random_mtp(model), **SMALL),
        }
    )


def settings_without_layers(model):
    """Return those whose drafter has no layer shaped as the model's: some layers have no such."""
    return Settings(_without_layers(model))


def _without_layers(model):
    heads = cache(lambda name: random_heads(name, model, dtype=torch.float32))
    medusa = cache(lambda: ALL["medusa"](heads("medusa"), widths=(3, 2)))
    share = {"gamma": 3, "ratio": 0.5, "min_tokens": 2}
    swift = {"k": 4, "n": 3, "budget": 10, "sinks": 2}

    def hierarchy():
        size = model.config.vocab_size
        small = tiny_model("llama", vocab_size=size, seed=9, num_hidden_layers=1)
        options = {"chunk_size": 4, "draft_gamma": 2, "draft_budget": 20}
        return ALL["triforce"](**share, **options, draft=small)

    def tokenswift(**options):
        return ALL["tokenswift"](heads("tokenswift"), (1, 2, 2), **swift, **options)

    return {
        "plain": ALL["plain"],
        "vegas": lambda: ALL["vegas"](**share, switch=False),
        "vegas-last-weight": lambda: ALL["vegas"](
            **share, rows="last", ranking="weight", switch=False
        ),
        "cast": lambda: ALL["cast"](gamma=3),
        "streaming": lambda: ALL["streaming"](**share, sinks=2),
        "quest": lambda: ALL["quest"](**share, page_size=4),
        "specextend": lambda: ALL["specextend"](**share, chunk_size=4),
        "triforce": lambda: ALL["triforce"](**share, chunk_size=4),
        "triforce-hierarchy": hierarchy,
        "prompt_lookup": lambda: ALL["prompt_lookup"](gamma=4),
        "suffix": lambda: ALL["suffix"](nodes=6, depth=4, k=3),
        "suffix-sized": lambda: ALL["suffix"](),
        "auto": lambda: ALL["auto"](trained=medusa()),
        "token_recycling": lambda: ALL["token_recycling"](nodes=7, depth=3, k=3),
        "medusa": medusa,
        "tokenswift": tokenswift,
        "tokenswift-static": lambda: tokenswift(dynamic=False),
    }


NAMES = tuple(settings_of(tiny_model("qwen3")))

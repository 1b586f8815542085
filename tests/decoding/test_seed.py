"""A seed decides the text: for every method, whatever a clock, a neighbour or a draft does."""

import itertools
from functools import cache

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from specattn.decoding import METHODS, LongSpec, PosS, TriForce, Vegas, generate
from specattn.decoding.drafting.gains import NONE, Effort
from specattn.decoding.drafting.pace import FixedSize
from tests.decoding.models import prompts, tiny_model
from tests.decoding.mtp_folders import random_drafter as random_mtp
from tests.drafters import dflash_statement, eagle3_statement, poss_statement
from tests.drafters.statement import random_drafter
from tests.drafters.test_heads import random_heads

SPARSE = {"gamma": 3, "min_tokens": 4}
SAMPLING = {"temperature": 1.3, "top_k": 0, "top_p": 0.95}
V = 24


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", vocab_size=V, peak=0.7)


@cache
def methods(model):
    """Return every method, those with drafters with random ones, once for all tests."""
    drafter = random_drafter(model, window=8, dtype=torch.float32)
    heads = {
        name: random_heads(name, model, dtype=torch.float32) for name in ("medusa", "tokenswift")
    }
    eagle3 = eagle3_statement.random_drafter(model, tokens=9, dtype=torch.float32)
    poss = poss_statement.random_drafter(model, layers=2, dtype=torch.float32)
    blocks = {
        name: dflash_statement.random_drafter(model, causal=name == "jetflow")
        for name in ("dflash", "jetflow")
    }
    return {
        **{
            name: f"{name}:gamma=3,min_tokens=4"
            for name in ("vegas", "streaming", "quest", "specextend", "triforce")
        },
        "triforce, small model": TriForce(
            **SPARSE, draft=tiny_model("llama", vocab_size=V, seed=3, peak=0.7), draft_gamma=2
        ),
        "cast": "cast:gamma=3",
        "longspec": LongSpec(drafter, widths=(2, 3)),
        "longspec, chain": LongSpec(drafter, gamma=3),
        "poss": PosS(poss, width=3, depth=3, total_tokens=8),
        "poss, sized": PosS(poss, width=3, depth=3),
        "eagle3": METHODS["eagle3"](eagle3, width=3, depth=3, total_tokens=8),
        "eagle3, sized": METHODS["eagle3"](eagle3, width=3, depth=3),
        **{
            name: METHODS[name](block, width=3, depth=3, total_tokens=8)
            for name, block in blocks.items()
        },
        "mtp": METHODS["mtp"](random_mtp(model), width=3, depth=3, total_tokens=8),
        "longspec, sized": LongSpec(drafter),
        "medusa": METHODS["medusa"](heads["medusa"], widths=(2, 2)),
        "tokenswift": METHODS["tokenswift"](heads["tokenswift"], widths=(2, 2), budget=60),
        "prompt_lookup": "prompt_lookup",
        "suffix": "suffix:nodes=9",
        "token_recycling": "token_recycling:nodes=9,k=3",
    }


@cache
def plain_texts(model, lengths, new_tokens, seed):
    """Return what plain decoding draws, once for all that ask alike."""
    texts = prompts(lengths, vocabulary=V)
    options = {"max_new_tokens": new_tokens, "seed": seed, **SAMPLING}
    return generate(model, texts, "plain", **options).new_tokens


NAMES = [
    *("vegas", "streaming", "quest", "specextend", "triforce", "triforce, small model", "longspec"),
    *("cast", "longspec, chain", "poss", "eagle3", "medusa", "tokenswift", "prompt_lookup"),
    *("suffix", "token_recycling", "dflash", "jetflow", "mtp"),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_method_emits_the_text_of_plain_decoding(model, name):
    method, texts = methods(model)[name], prompts([5, 17, 30], vocabulary=V)
    for seed in (0, 7):
        found = generate(model, texts, method, max_new_tokens=24, seed=seed, **SAMPLING)
        assert found.new_tokens == plain_texts(model, (5, 17, 30), 24, seed)
    assert found.statistics.total.drafted > 0


def test_another_seed_is_another_text(model):
    texts = prompts([9], vocabulary=V)
    found = {
        tuple(generate(model, texts, "plain", max_new_tokens=12, seed=n, **SAMPLING).new_tokens[0])
        for n in range(20)
    }
    assert len(found) == 20


@pytest.mark.parametrize("clock", [lambda n: n % 2, lambda n: n % 3 == 0, lambda n: n > 5])
def test_a_clock_changes_no_text(model, monkeypatch, clock):
    texts = prompts([12, 30], vocabulary=V)
    rounds = itertools.count()
    chosen = {False: NONE, True: Effort(1, 3)}
    monkeypatch.setattr(FixedSize, "choose", lambda *_: chosen[bool(clock(next(rounds)))])
    found = generate(model, texts, Vegas(**SPARSE), max_new_tokens=24, seed=3, **SAMPLING)
    assert found.new_tokens == plain_texts(model, (12, 30), 24, 3)


def test_a_neighbour_changes_no_text(model):
    text, other, longer = prompts([12, 5, 30], vocabulary=V)
    alone = generate(model, [text], Vegas(**SPARSE), max_new_tokens=16, seed=3, **SAMPLING)
    for neighbour in (other, longer):
        both = generate(
            model, [text, neighbour], Vegas(**SPARSE), max_new_tokens=16, seed=3, **SAMPLING
        )
        assert both.new_tokens[0] == alone.new_tokens[0]


@pytest.mark.parametrize("name", ["vegas", "longspec, chain", "token_recycling"])
def test_a_resumed_run_goes_on_with_the_same_text(model, name):
    method, (text,) = methods(model)[name], prompts([9], vocabulary=V)
    whole = generate(model, [text], method, max_new_tokens=30, seed=5, **SAMPLING).new_tokens[0]
    for cut in (1, 7, 20):
        begun = torch.cat([text, torch.tensor(whole[:cut])])
        rest = generate(
            model,
            [begun],
            method,
            max_new_tokens=30 - cut,
            seed=5,
            num_pregenerated=cut,
            **SAMPLING,
        )
        assert rest.new_tokens[0] == whole[cut:]


def test_noise_of_the_rejection_rule_is_its_own(model):
    """Its drafts are sampled by themselves: one seed, one text, but not that of plain decoding."""
    texts = prompts([30], vocabulary=V)
    plain = generate(model, texts, "plain", max_new_tokens=24, seed=3, **SAMPLING)
    method = Vegas(**SPARSE, rejection=True, switch=False)
    one, other = (
        generate(model, texts, method, max_new_tokens=24, seed=3, **SAMPLING).new_tokens
        for _ in range(2)
    )
    assert one == other != plain.new_tokens


class Without(LogitsProcessor):
    """Leaves nothing to say once a text is so long."""

    def __init__(self, length, value):
        self.length, self.value = length, value

    def __call__(self, input_ids, scores):
        return scores if input_ids.shape[1] < self.length else torch.full_like(scores, self.value)


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 0}])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_nothing_to_sample_from_is_an_error(model, value, sampling, rejection):
    texts = prompts([12, 12], vocabulary=V)
    method = Vegas(**SPARSE, rejection=rejection, switch=False)
    with pytest.raises(ValueError, match=r"request [01]: no token can follow at position 15"):
        generate(
            model,
            texts,
            method,
            max_new_tokens=16,
            logits_processor=LogitsProcessorList([Without(15, value)]),
            **sampling,
        )

"""What the fuzzing tests draw: a method with options of its own, and how a run is shaped."""

import functools

import torch
from hypothesis import strategies as st
from transformers import StoppingCriteria

from specattn.decoding import METHODS
from tests.decoding.models import tiny_model
from tests.decoding.mtp_folders import random_drafter as random_mtp
from tests.drafters import dflash_statement, eagle3_statement, poss_statement
from tests.drafters.statement import random_drafter
from tests.drafters.test_heads import random_heads

WINDOW = 7
"""Of LongSpec's drafter; a draft must be less deep."""


@functools.cache
def model_of(family, vocabulary, peak=8.0):
    return tiny_model(family, vocab_size=vocabulary, peak=peak)


@functools.cache
def drafter_of(kind, family, vocabulary, peak):
    """Return a random trained drafter, or a small model, for the model of these arguments."""
    model = model_of(family, vocabulary, peak)
    if kind == "longspec":
        return random_drafter(model, window=WINDOW, dtype=torch.float32)
    if kind == "poss":
        return poss_statement.random_drafter(model, layers=2, dtype=torch.float32)
    if kind == "mtp":
        return random_mtp(model)
    if kind == "eagle3":
        tokens = vocabulary // 2
        return eagle3_statement.random_drafter(model, tokens=tokens, dtype=torch.float32)
    if kind in ("dflash", "jetflow"):
        return dflash_statement.random_drafter(model)
    if kind == "small":
        return tiny_model("llama", vocab_size=vocabulary, seed=9, num_hidden_layers=1)
    return random_heads(kind, model, dtype=torch.float32)


def _options(**strategies):
    return st.fixed_dictionaries({}, optional=strategies)


_gamma = st.none() | st.integers(1, 9)
_widths = st.none() | st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
_share = {
    "gamma": _gamma,
    "ratio": st.sampled_from([0.01, 0.3, 0.7, 1.0]),
    "budget": st.none() | st.integers(1, 20),
    "min_tokens": st.integers(0, 8),
}
UNTRAINED = {
    "plain": _options(),
    "vegas": _options(
        **_share,
        keep_first=st.integers(0, 3),
        keep_last=st.integers(0, 3),
        rows=st.sampled_from(["two", "all", "last"]),
        ranking=st.sampled_from(["logit", "weight"]),
        switch=st.booleans(),
    ),
    "cast": _options(gamma=_gamma, weights=st.sampled_from(["int8", "int4"])),
    "streaming": _options(**_share, sinks=st.integers(0, 4)),
    "quest": _options(**_share, page_size=st.integers(1, 9)),
    "specextend": _options(**_share, chunk_size=st.integers(1, 9)),
    "triforce": _options(**_share, chunk_size=st.integers(1, 9)),
    "prompt_lookup": _options(gamma=_gamma, longest=st.integers(1, 4)),
    "suffix": _options(
        nodes=st.none() | st.integers(1, 9),
        depth=st.integers(1, 5),
        recycling=st.booleans(),
        k=st.integers(1, 9),
    ),
    "auto": _options(vegas=st.booleans(), cast=st.booleans()),
    "token_recycling": _options(
        nodes=st.none() | st.integers(1, 9), depth=st.integers(1, 5), k=st.integers(1, 9)
    ),
}
_grown = _options(
    width=st.integers(1, 4),
    depth=st.integers(1, 4),
    total_tokens=st.none() | st.integers(2, 12),
    window=st.none() | st.integers(1, 9),
)
TRAINED = {
    "small": (
        functools.partial(METHODS["triforce"], chunk_size=4),
        _options(**_share, draft_gamma=st.integers(1, 4), draft_budget=st.integers(17, 24)),
    ),
    "longspec": (
        METHODS["longspec"],
        _options(widths=_widths, gamma=st.sampled_from([None, "auto", *range(1, WINDOW)])),
    ),
    "medusa": (METHODS["medusa"], _options(widths=_widths)),
    "tokenswift": (
        METHODS["tokenswift"],
        st.fixed_dictionaries(
            {"budget": st.integers(3, 20), "sinks": st.integers(0, 2)},
            optional={
                "widths": _widths,
                "k": st.integers(0, 5),
                "n": st.integers(2, 5),
                "remembered": st.integers(5, 30),
                "dynamic": st.booleans(),
            },
        ),
    ),
    "poss": (METHODS["poss"], _grown),
    "eagle3": (METHODS["eagle3"], _grown),
    "dflash": (METHODS["dflash"], _grown),
    "jetflow": (METHODS["jetflow"], _grown),
    "mtp": (METHODS["mtp"], _grown),
}


@st.composite
def methods(draw, family, vocabulary, peak):
    """Draw a method for the model of these arguments."""
    kind = draw(st.sampled_from([*UNTRAINED, *TRAINED]))
    if kind in UNTRAINED:
        return METHODS[kind](**draw(UNTRAINED[kind]))
    method, options = TRAINED[kind]
    name = "draft" if kind == "small" else "drafter"
    return method(**{name: drafter_of(kind, family, vocabulary, peak)}, **draw(options))


# Beside a rule of what may follow, more that forbids could leave nothing: transformers would then
# break the rule itself.
_FORBIDDING = (
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "min_new_tokens",
    "min_length",
)


def _kept(strategies, forbidding):
    return {n: s for n, s in strategies.items() if forbidding or n not in _FORBIDDING}


def processors(vocabulary, *, forbidding):
    """Draw options of transformers that shape the distribution by what the text is."""
    token = st.integers(0, vocabulary - 1)
    tokens = st.lists(token, min_size=1, max_size=3, unique=True)
    few = {
        "repetition_penalty": st.sampled_from([0.7, 1.3, 1.9]),
        "no_repeat_ngram_size": st.integers(2, 3),
        "encoder_repetition_penalty": st.sampled_from([0.8, 1.5]),
        "bad_words_ids": st.lists(st.lists(token, min_size=1, max_size=2), min_size=1, max_size=2),
        "suppress_tokens": tokens,
        "begin_suppress_tokens": tokens,
        "sequence_bias": st.lists(token, min_size=1, max_size=2).map(lambda ids: [[ids, 9.0]]),
    }
    few = _kept(few, forbidding)
    names = st.lists(st.sampled_from(list(few)), max_size=2, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({n: few[n] for n in chosen}))


def endings(vocabulary, *, forbidding):
    """Draw options that say when a text may end, or must."""
    ends = st.lists(st.integers(0, vocabulary - 1), min_size=1, max_size=3, unique=True)
    more = {
        "min_new_tokens": st.integers(1, 6),
        "min_length": st.integers(1, 20),
        "forced_eos_token_id": st.integers(0, vocabulary - 1),
        "exponential_decay_length_penalty": st.just((2, 1.5)),
    }
    one = st.just({}) | st.one_of(
        [st.fixed_dictionaries({n: s}) for n, s in _kept(more, forbidding).items()]
    )
    return st.just({}) | st.builds(lambda ends, one: {"eos_token_id": ends, **one}, ends, one)


class StopAtSum(StoppingCriteria):
    """Ends a text whose tokens add up to a multiple of a number."""

    def __init__(self, divisor):
        self.divisor = divisor

    def __call__(self, input_ids, scores, **_):
        return input_ids.sum(1) % self.divisor == 0


class Allowed:
    """A rule of which tokens may follow, which refuses texts that break it."""

    def __init__(self, texts, vocabulary, ends):
        self.texts, self.vocabulary, self.ends = texts, vocabulary, ends

    def after(self, text):
        return sorted({(text[-1] * 3 + step * len(text)) % self.vocabulary for step in (1, 2, 5)})

    def __call__(self, row, text):
        text, prompt = text.tolist(), self.texts[row].tolist()
        assert text[: len(prompt)] == prompt, "shown a text of another row"
        for end in range(len(prompt), len(text)):
            assert text[end] in self.after(text[:end]), "shown a text that was forbidden"
            assert text[end] not in self.ends, "shown a text that has ended"
        return self.after(text)

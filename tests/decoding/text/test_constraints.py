"""Processors that know their row, its own text and nothing that cannot occur."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

from specattn.decoding import generate
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model
from tests.decoding.settings import NAMES, settings_of

V, PAD, EOS, SEPARATOR = 12, 11, 10, 9
MODEL = tiny_model("qwen3", vocab_size=V)
SETTINGS = settings_of(MODEL)
TEXTS = [torch.cat([text, torch.tensor([SEPARATOR])]) for text in prompts([4, 17, 9], vocabulary=9)]


class Trie:
    """The texts that may be said: it does not know any other, and says so."""

    def __init__(self, texts):
        self.next = {}
        for text in texts:
            for length in range(len(text)):
                self.next.setdefault(tuple(text[:length]), set()).add(text[length])

    def allowed(self, text):
        text = text.tolist()
        said = tuple(text[text.index(SEPARATOR) + 1 :])  # a text without one is no text
        return sorted(self.next[said])


def random_texts(seed, count=40, longest=9):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, 4, (n,), generator=generator).tolist() + [EOS] for n in lengths]


TRIES = [Trie(random_texts(seed)) for seed in range(3)]


class InTheTrie(LogitsProcessor):
    """Looks at texts alone: whatever row they are in, they must be in the trie."""

    def __call__(self, input_ids, scores):
        masked = torch.full_like(scores, -torch.inf)
        for row, text in enumerate(input_ids):
            tokens = TRIES[0].allowed(text)
            masked[row, tokens] = scores[row, tokens]
        return masked


def names_and_temperatures():
    """Yield all methods; greedily all are quick, sampled one of each kind of draft."""
    for name in NAMES:
        quick = name in ("plain", "vegas", "suffix", "longspec-tree", "poss", "medusa")
        yield name, 0.0
        yield pytest.param(name, 5.0, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "temperature"), list(names_and_temperatures()))
def test_a_trie_for_each_row_is_asked_about_its_own_texts_alone(name, temperature):
    output = generate(
        MODEL,
        TEXTS,
        SETTINGS[name],
        max_new_tokens=12,
        eos_token_id=EOS,
        pad_token_id=PAD,
        temperature=temperature,
        seed=0,
        prefix_allowed_tokens_fn=lambda row, text: TRIES[row].allowed(text),
    )
    for row, (text, new) in enumerate(zip(TEXTS, output.new_tokens, strict=True)):
        assert new in random_texts(row)
        if temperature == 0:
            assert new == greedy_by_transformers(
                MODEL,
                text,
                12,
                eos_token_id=EOS,
                pad_token_id=PAD,
                prefix_allowed_tokens_fn=lambda _, text, row=row: TRIES[row].allowed(text),
            )


@pytest.mark.parametrize("name", NAMES)
def test_a_processor_that_refuses_texts_is_shown_none_of_them(name):
    output = generate(
        MODEL,
        TEXTS,
        SETTINGS[name],
        max_new_tokens=12,
        eos_token_id=EOS,
        temperature=5.0,
        seed=0,
        logits_processor=LogitsProcessorList([InTheTrie()]),
    )
    assert all(new in random_texts(0) for new in output.new_tokens)


OPTIONS = [
    {"no_repeat_ngram_size": 2},
    {"repetition_penalty": 1.8},
    {"encoder_repetition_penalty": 1.8},
    {"min_length": 20, "eos_token_id": list(range(6))},
    {"min_new_tokens": 6, "eos_token_id": list(range(6))},
    {"begin_suppress_tokens": list(range(6))},
    {"forced_eos_token_id": EOS, "eos_token_id": EOS},
    {"exponential_decay_length_penalty": (3, 2.0), "eos_token_id": EOS},
]


@pytest.mark.parametrize("name", ["plain", "vegas", "token_recycling"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_neighbours_and_their_lengths_do_not_show(options, name):
    """Padding would be a token that occurs in the texts."""
    options = {"pad_token_id": 3, **options}
    output = generate(MODEL, TEXTS, SETTINGS[name], max_new_tokens=12, **options)
    assert output.new_tokens == [greedy_by_transformers(MODEL, p, 12, **options) for p in TEXTS]


def test_a_length_counts_each_text_from_its_own_beginning():
    output = generate(MODEL, TEXTS, "plain", max_length=21)
    assert output.new_tokens == [
        greedy_by_transformers(MODEL, p, None, max_length=21) for p in TEXTS
    ]
    assert [len(sequence) for sequence in output.sequences] == [21] * 3


def test_processors_and_criteria_see_texts_without_padding():
    seen = set()

    class Processor(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.update(map(tuple, input_ids.tolist()))
            return scores

    class Criterion(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            seen.update(map(tuple, input_ids.tolist()))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    output = generate(
        MODEL,
        TEXTS,
        "plain",
        max_new_tokens=3,
        logits_processor=[Processor()],
        stopping_criteria=[Criterion()],
    )
    whole = {
        tuple(sequence[: len(text) + count].tolist())
        for text, sequence in zip(TEXTS, output.sequences, strict=True)
        for count in range(4)
    }
    assert seen == whole

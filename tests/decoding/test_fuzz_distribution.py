"""Any method and any sampling: what is said first has the distribution by enumeration."""

import itertools
import os

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specattn.decoding import generate
from tests import distributions
from tests.decoding.fuzzing import methods, model_of
from tests.decoding.models import prompts
from tests.decoding.test_distribution import whole_batches  # noqa: F401 - a fixture for all tests

V, DEPTH, COPIES, PEAK = 5, 2, 600, 0.7
FUZZING = os.environ.get("SPECATTN_HYPOTHESIS") == "fuzz"
CASES = 200 if FUZZING else 6
SIGNIFICANCE = 1e-7 if FUZZING else distributions.SIGNIFICANCE  # fixed cases pass always or never

SAMPLING = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.5, 1.0, 1.6]), "top_k": st.sampled_from([0, 2, 4])},
    optional={
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.sampled_from([0.1, 0.3]),
        "repetition_penalty": st.sampled_from([0.7, 1.8]),
        "no_repeat_ngram_size": st.just(2),
        "bad_words_ids": st.just([[1], [2, 3]]),
        "begin_suppress_tokens": st.just([0]),
    },
)


def tables(model, prompt, options):
    """Return next-token probabilities after every continuation, by transformers' own scores."""
    found = []
    for depth in range(DEPTH):
        new = torch.tensor(list(itertools.product(range(V), repeat=depth))).view(V**depth, depth)
        ids = torch.cat([prompt.expand(len(new), -1), new.long()], 1)
        processors = model.generate(
            prompt[None],
            max_new_tokens=DEPTH,
            do_sample=True,
            custom_generate=lambda *_, logits_processor, **__: logits_processor,
            **options,
        )
        with torch.no_grad():
            found.append(processors(ids, model(ids).logits[:, -1]).double().softmax(-1))
    return found


@settings(max_examples=CASES)
@given(st.data())
def test_the_first_tokens_have_the_targets_distribution(data):
    family = data.draw(st.sampled_from(["qwen3", "gpt_oss", "mistral-sliding"]), "family")
    method = data.draw(methods(family, V, PEAK), "method")
    options = data.draw(SAMPLING, "sampling")
    (prompt,) = prompts([data.draw(st.integers(1, 14), "length")], vocabulary=V)
    model, seed = model_of(family, V, PEAK), data.draw(st.integers(0, 99), "seed")
    copies = prompt.expand(COPIES, -1)
    output = generate(
        model, copies, method, max_new_tokens=DEPTH + 2, do_sample=True, seed=seed, **options
    )
    number = (torch.tensor(output.new_tokens)[:, :DEPTH] * torch.tensor([V, 1])).sum(-1)
    distribution = distributions.joint(tables(model, prompt, options)).nan_to_num()
    assert distributions.p_value(number, distribution) > SIGNIFICANCE

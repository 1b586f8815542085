"""Any method, model, shape of text and end of it: greedy texts are transformers', each alone."""

import os

from hypothesis import given, reject, settings
from hypothesis import strategies as st
from transformers import StoppingCriteriaList

from specattn.decoding import generate
from tests.decoding.fuzzing import Allowed, StopAtSum, endings, methods, model_of, processors
from tests.decoding.models import CONFIGS, greedy_by_transformers, nothing_follows, prompts

V = 12
CASES = 20_000 if os.environ.get("SPECATTN_HYPOTHESIS") == "fuzz" else 75


@settings(max_examples=CASES)
@given(st.data())
def test_greedy_texts_are_those_of_transformers(data):
    family = data.draw(st.sampled_from(list(CONFIGS)), "family")
    method = data.draw(methods(family, V, 8.0), "method")
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=3), "lengths")
    texts = prompts(lengths, vocabulary=V, seed=data.draw(st.integers(0, 99), "seed"))
    count = data.draw(st.integers(1, 12), "max_new_tokens")
    constrained = data.draw(st.booleans(), "constrained")
    options = data.draw(processors(V, forbidding=not constrained), "processors")
    options = options | data.draw(endings(V, forbidding=not constrained), "endings")
    divisor = data.draw(st.none() | st.integers(5, 30), "divisor")
    criteria = StoppingCriteriaList([] if divisor is None else [StopAtSum(divisor)])
    model, ends = model_of(family, V), options.get("eos_token_id", [])

    def shaped(texts):
        rule = Allowed(texts, V, ends)
        constraint = {"prefix_allowed_tokens_fn": rule} if constrained else {}
        return {**options, **constraint, "stopping_criteria": criteria, "pad_token_id": 3}

    try:
        expected = [greedy_by_transformers(model, text, count, **shaped([text])) for text in texts]
    except ValueError:  # of options that contradict one another
        reject()
    try:
        output = generate(
            model, texts, method, max_new_tokens=count, temperature=0, **shaped(texts)
        )
    except ValueError as error:  # where transformers emits token 0
        if "no token can follow" not in str(error):
            raise
        output = None
    if output is None:
        assert any(nothing_follows(model, text, count, **shaped([text])) for text in texts)
        return
    assert output.new_tokens == expected
    for request in output.statistics.requests:
        assert request.new_tokens == request.accepted + request.rounds - request.discarded
        assert sum(request.accepted_at) == request.accepted <= request.drafted

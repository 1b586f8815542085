"""All is timed at once where it is asked for, and runs then draft from the first tokens on."""

import pytest

from specattn.decoding import METHODS, calibrate, generate
from tests.decoding.fuzzing import drafter_of, model_of
from tests.decoding.models import prompts


def test_what_may_be_drafted_is_timed_before_a_text():
    model = model_of("qwen3", 24, 0.7)
    method = METHODS["poss"](drafter_of("poss", "qwen3", 24, 0.7), width=3, depth=3)
    found = calibrate(model, method, length=30, batch=2)
    assert {*found["ms of a poss, width x depth"]} == {"1 x 1", "1 x 3", "3 x 3"}
    rows = sorted(map(int, found["ms of a pass"]))
    assert rows[0] == 2
    assert rows[-1] == 2 * min(method.max_nodes, 60)
    text = prompts([30, 28], vocabulary=24)
    output = generate(model, text, method, max_new_tokens=12, temperature=0)
    spent = output.statistics.details["seconds of calibrating, all runs"]
    assert spent == pytest.approx(found["seconds of calibrating, all runs"], abs=1e-3)


@pytest.mark.parametrize("option", ["length", "batch"])
def test_options_out_of_range_are_named(option):
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        calibrate(model_of("qwen3", 24, 0.7), **{option: 0})

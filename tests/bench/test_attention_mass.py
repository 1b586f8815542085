"""The share of the attention on what is read is all of it where everything is read."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from studies import attention_mass  # noqa: E402
from tests.decoding.models import prompts, tiny_model  # noqa: E402

from specattn.decoding import Target  # noqa: E402
from specattn.decoding.engine.snapshot import PromptSnapshot  # noqa: E402


@pytest.mark.parametrize(("context", "whole"), [(70, True), (450, False)])
def test_short_texts_are_read_whole(context, whole):
    """Texts of up to 256 tokens are within every method's least budget."""
    (tokens,) = prompts([context + 2 * (attention_mass.GAMMA + 1)])
    target = Target(tiny_model(), 1, context + 41)
    PromptSnapshot(target, [tokens[: context + 1]])
    with torch.no_grad():
        found = attention_mass.coverage(target, tokens[None, context:])
    first = found.pop(attention_mass.FIRST)
    assert 0 < min(first) < max(first) < 1
    for name, shares in found.items():
        assert len(shares) == 3 * attention_mass.GAMMA
        if whole:
            assert shares == pytest.approx([1.0] * len(shares)), name
        else:
            assert min(shares) > 0.1, name
            assert sum(shares) < len(shares) - 0.01, name

"""vLLM's sampler verifies drafts at the temperature that was asked for, and hybrids are refused."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="run by `make test-vllm`")
import torch
from vllm.v1.sample.rejection_sampler import RejectionSampler, expand_batch_to_tokens

from specattn.integrations.vllm.prepare import prepare, sample_plainly, set_right
from specattn.integrations.vllm.steps import Steps
from tests.integrations.vllm.engine import Engine, Expected, prompt_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_each_request_has_its_own_value_for_all_of_its_drafts(dtype):
    set_right()
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expand_batch_to_tokens(torch.tensor([7, 8, 0], dtype=dtype), ends, 5, 0, 1)
    assert found.tolist() == [7, 7, 1, 1, 1]
    assert found.dtype == dtype


def test_a_hybrid_is_refused_by_name():
    config = SimpleNamespace(model_config=SimpleNamespace(is_hybrid=True))
    with pytest.raises(ValueError, match="a hybrid; leave out --speculative-config"):
        prepare(config)


def test_a_step_without_drafts_is_sampled_as_without_a_drafter():
    sample_plainly()
    sample_plainly()  # once is enough
    asked = []
    sampler = SimpleNamespace(
        logprobs_mode="raw_logprobs", sampler=lambda **given: asked.append(given) or "sampled"
    )
    sampler.forward = RejectionSampler.forward.__get__(sampler)
    given = {"logits": torch.zeros(2, 5), "sampling_metadata": object()}
    found = sampler.forward(SimpleNamespace(max_spec_len=0), None, *given.values())
    assert found == "sampled"
    assert asked == [given]
    with pytest.raises(AttributeError, match="bonus_logits_indices"):  # vLLM's own goes on
        sampler.forward(SimpleNamespace(max_spec_len=1), None, *given.values())


@pytest.mark.parametrize("name", ["Auto", "Suffix"])
def test_drafts_are_accepted_as_the_temperature_says(name, monkeypatch):
    """So cold that texts are greedy ones, beside a greedy request."""
    monkeypatch.setenv("SPECATTN_VLLM", "1")
    # Rows cost nothing, however busy the machine is that `Auto` looks at.
    monkeypatch.setattr(Steps, "plain", 1.0)
    monkeypatch.setattr(Steps, "seconds", lambda self, rows: np.ones(len(rows)))
    engine = Engine(f"specattn.integrations.vllm.{name}")
    try:
        # vLLM takes 0.01 at least: in these texts the second token is 0.08 behind, or more.
        prompts = [prompt_of(n, n) for n in (120, 90, 80)]
        for prompt in prompts:
            engine.add(prompt, 60, temperature=0.01)
        name = engine.add(prompts[0], 60)
        texts = {}
        while engine.engine.has_unfinished_requests():
            for request, tokens in engine.step().items():
                texts.setdefault(request, []).extend(tokens)
        expected = Expected()
        assert list(texts.values()) == [expected(one, 60) for one in (*prompts, prompts[0])]
        assert engine.count("spec_decode_num_accepted_tokens") > 30
    finally:
        engine.close()

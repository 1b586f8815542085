"""A model over two ranks of vLLM drafts for itself, by what rank 0 decides."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="run by `make test-vllm`")

from specattn.integrations.vllm.self_drafts import SelfDrafts
from tests.integrations.vllm.engine import Engine, Expected, prompt_of

DRAFTERS = ("tests.integrations.vllm.always.AlwaysVegas", "specattn.integrations.vllm.Auto")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_ranks_write_the_text_of_one(drafter, monkeypatch):
    monkeypatch.setenv("SPECATTN_VLLM", "1")
    expected = Expected()
    engine = Engine(drafter, tensor_parallel_size=2)
    try:
        prompts = [prompt_of(n, n) for n in (5, 127, 300, 600, 64, 2)]
        assert engine.texts(prompts, 48) == [expected(prompt, 48) for prompt in prompts]
        assert engine.count("spec_decode_num_accepted_tokens") > 0
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["pipeline", "data"])
def test_stages_and_replicas_are_refused_by_name(kind):

    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": 1} | {f"{kind}_parallel_size": 2}
    config = SimpleNamespace(parallel_config=SimpleNamespace(**sizes))
    with pytest.raises(ValueError, match=f"Vegas: expected {kind} parallelism of 1, got 2"):
        SelfDrafts("Vegas", config, None, 4, 0.07, 256)

"""vLLM's V2 runner takes no drafters of ours: V1 is chosen, or a refusal says so at the start."""

import pytest

pytest.importorskip("vllm", reason="run by `make test-vllm`")
import vllm.config.vllm as configuration
from vllm.engine.arg_utils import EngineArgs

from tests.integrations.vllm.engine import CAPACITY, TINY

DRAFTER = {
    "method": "custom_class",
    "model": "specattn.integrations.vllm.Auto",
    "num_speculative_tokens": 4,
}


@pytest.fixture
def settings(monkeypatch):
    """Return arguments of an engine, on a machine that has what V2 needs."""
    monkeypatch.setattr(configuration, "HAS_TRITON", True)
    options = {"dtype": "float32", "max_model_len": CAPACITY, "skip_tokenizer_init": True}
    return EngineArgs(model=str(TINY), speculative_config=DRAFTER, **options)


def test_v1_is_chosen_for_a_drafter(settings, monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    config = settings.create_engine_config()
    assert not config.use_v2_model_runner
    assert not config.scheduler_config.async_scheduling


def test_where_v2_is_forced_the_drafter_is_refused_by_name(settings, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="speculative method 'custom_class'"):
        settings.create_engine_config()

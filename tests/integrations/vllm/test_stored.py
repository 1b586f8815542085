"""Folders that `specattn quantize` wrote, read by vLLM and by transformers with compressed-tensors.

vLLM for CPUs has a product for codes of 4 bits in bfloat16 alone, and that with AVX-512. It reads
the others as well; with what it then keeps torch multiplies here.
"""

import pytest

pytest.importorskip("vllm", reason="run by `make test-vllm`")
import torch
from transformers import AutoModelForCausalLM
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    unpack_quantized_values_into_int32,
)
from vllm.platforms.interface import PlatformEnum

from specattn.decoding import generate
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.decoding.model.quantised import QUANTIZE
from specattn.decoding.model.store import store_rounded
from tests.decoding.models import tiny_model
from tests.integrations.vllm.engine import TINY, Engine, prompt_of

PROMPTS = [prompt_of(n, n) for n in (7, 130)]


class Integers(MPLinearKernel):
    """Multiplies with integers that have a scale for a group or a row."""

    @classmethod
    def get_min_capability(cls):
        return -1

    @classmethod
    def can_implement(cls, c):
        return c.act_type == torch.float32 and not c.zero_points, "float32 without zeros alone"

    def process_weights_after_loading(self, layer):
        packed, scale, _ = self._get_weight_params(layer)
        kind = self.config.weight_type
        codes = unpack_quantized_values_into_int32(packed.data, kind, 1) - kind.bias
        codes = codes[:, : self.config.partition_weight_shape[0]]
        wide = codes.unflatten(1, (scale.shape[1], -1)) * scale.data[..., None]
        self.weight = wide.flatten(1).to(self.config.act_type)

    def apply_weights(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, self.weight, bias)


class Floats(FP8ScaledMMLinearKernel):
    """Multiplies with floats of 8 bits that have a scale for each output."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, c):
        return True, None

    def apply_weights(self, layer, x, bias=None):
        weight, scale, _, _ = self._get_layer_params(layer)
        return torch.nn.functional.linear(x, (weight.to(x.dtype) * scale.t().to(x.dtype)).t(), bias)

    def apply_scaled_mm(self, **_):
        raise NotImplementedError


@pytest.fixture
def products(monkeypatch):
    """Let vLLM multiply with what it reads and has no product for on a CPU."""
    monkeypatch.setitem(linear._POSSIBLE_WFP8A16_KERNELS, PlatformEnum.CPU, [Floats])
    known = linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.CPU, [Integers, *known])


def continued(folder, dtype):
    """Return vLLM's greedy texts behind the prompts, and their tokens' log-probabilities."""
    engine = Engine(model=str(folder), dtype=dtype, max_model_len=512)
    try:
        return [engine.logprobs(prompt) for prompt in PROMPTS]
    finally:
        engine.close()


@torch.no_grad()
def logits(model, prompt, text):
    """Return what a model says of each token of a text."""
    return model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].float()


def chances_of(model, prompt, text):
    chosen = logits(model, prompt, text).log_softmax(-1)
    return chosen.gather(1, torch.tensor(text)[:, None])[:, 0]


def check(folder):
    """In float32 all three compute the same but for the order of sums."""
    ours = load_causal_model(folder, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"max_new_tokens": 24, "temperature": 0, "eos_token_id": None}
    texts = generate(ours, [*map(torch.tensor, PROMPTS)], "plain", **options).new_tokens
    found = continued(folder, "float32")
    assert [text for text, _ in found] == texts
    for prompt, (text, chances) in zip(PROMPTS, found, strict=True):
        own = logits(ours, prompt, text)
        assert torch.allclose(logits(theirs, prompt, text), own, rtol=1e-4, atol=1e-3)
        assert torch.allclose(
            torch.tensor(chances), chances_of(ours, prompt, text), rtol=1e-4, atol=1e-3
        )


@pytest.mark.parametrize("kind", QUANTIZE)
@pytest.mark.filterwarnings("ignore")
def test_texts_of_vllm_and_transformers_are_ours(tmp_path, kind, products):
    store_rounded(TINY, tmp_path / "few", kind)
    check(tmp_path / "few")


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_layers_of_groups_beside_layers_of_rows(tmp_path, kind, products):
    """A row of 100 codes is no multiple of a group; the layers of both kinds are named."""
    model = tiny_model(
        "qwen3", hidden_size=128, head_dim=32, intermediate_size=100, vocab_size=4096
    ).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "whole")
    store_rounded(tmp_path / "whole", tmp_path / "few", kind)
    check(tmp_path / "few")


@pytest.mark.filterwarnings("ignore")
def test_the_product_that_vllm_has(tmp_path):
    """Of 4 bits in bfloat16: at most twice as far from float32 as ours is."""
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM has no such product for this processor")
    store_rounded(TINY, tmp_path / "few", "int4")
    whole, ours = (load_causal_model(tmp_path / "few", x) for x in (torch.float32, torch.bfloat16))
    errors = []
    found = continued(tmp_path / "few", "bfloat16")
    for prompt, (text, chances) in zip(PROMPTS, found, strict=True):
        exact = chances_of(whole, prompt, text)
        both = torch.tensor(chances), chances_of(ours, prompt, text)
        errors.append(torch.stack(both) - exact)
    theirs, own = torch.cat(errors, 1).square().mean(1).sqrt()
    assert 0 < theirs <= 2 * own

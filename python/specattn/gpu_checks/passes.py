"""Whole passes of a small model for ``specattn gpu-check``: captured kernels against its modules.

Its weights are among a case's arguments, so the reference computes with the same ones in float64.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
_PROMPT, _ROWS = 40, 6


def make() -> dict[str, Any]:
    """Return the tokens of a text [1, 46] and a model's weights in bfloat16, by name."""
    generator = torch.Generator().manual_seed(9)
    model = _model(torch.float32)
    given: dict[str, Any] = {
        name: (
            torch.ones_like(weight)
            if weight.dim() == 1
            else torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            * weight.shape[1] ** -0.5
        ).bfloat16()
        for name, weight in model.state_dict().items()
    }
    size = (1, _PROMPT + _ROWS)
    return {"tokens": torch.randint(_SIZES["vocab_size"], size, generator=generator)} | given


def run(tokens: torch.Tensor, *, quantize: str | None, kv_dtype: str | None, **weights: Any) -> Any:
    """Return the logits of the last rows, by the fastest pass there is for where the tokens are.

    Raises what a user would only be warned of: that passes are not captured as kernels.
    """
    from specattn.decoding.engine.target import Target
    from specattn.decoding.passes.captured import CapturedRunner
    from specattn.tree import Tree

    model = _model(next(iter(weights.values())).dtype).to(tokens.device)
    model.load_state_dict(weights)
    with torch.no_grad(), warnings.catch_warnings():
        # torch warns of every product by cuBLAS while algorithms shall be deterministic.
        warnings.simplefilter("ignore", UserWarning)
        warnings.filterwarnings("error", ".* slower modules: ", UserWarning)
        target = Target(model, 1, 64, quantize=quantize, kv_dtype=kv_dtype)
        if tokens.is_cuda and not isinstance(target.runner, CapturedRunner):
            raise ValueError(f"expected passes {CapturedRunner.how}, got {target.runner.how}")
        target.prefill([tokens[0, :_PROMPT]], chunk_size=_PROMPT)
        return target.verify(Tree.chain(_ROWS - 1), tokens[:, _PROMPT:]).logits


def _model(dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(LlamaConfig(**_SIZES), dtype=dtype).eval()

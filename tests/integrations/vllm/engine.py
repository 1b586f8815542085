"""A small vLLM in this process, and what transformers says the texts are."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

TINY = Path(__file__).parents[3] / "examples" / "tiny"
CAPACITY = 1024
BLOCK = 128  # tokens, vLLM's choice on a CPU
BLOCKS = 12  # little more than the longest text takes, so that several together are preempted
CHUNK = 160  # tokens of a step: prompts are read in parts, beside requests that decode
BLOCK_BYTES = BLOCK * 2 * 6 * 2 * 64 * 4  # keys and values, layers, heads, head_dim, float32


class Engine:
    """An engine of vLLM, stepped by hand."""

    def __init__(self, drafter: str | None = None, **options):
        drafting = drafter and {
            "method": "custom_class",
            "model": drafter,
            "num_speculative_tokens": 4,
        }
        settings = {
            "model": str(TINY),
            "dtype": "float32",
            "max_model_len": CAPACITY,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": BLOCKS * BLOCK_BYTES,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "disable_log_stats": False,
            "per_request_spec_decode_metrics": "summary" if drafter else "none",
            "speculative_config": drafting,
            "seed": 0,
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(**settings | options))
        self.asked = 0

    def close(self) -> None:
        """Give back what a second engine in this process would stumble over."""
        del self.engine
        cleanup_dist_env_and_memory()

    def add(self, prompt, new_tokens=24, **sampling) -> str:
        """Add a request, greedy unless told otherwise; return its name."""
        self.asked += 1
        name = str(self.asked)
        options = {
            "temperature": 0.0,
            "max_tokens": new_tokens,
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": RequestOutputKind.DELTA,
        }
        self.engine.add_request(
            name, {"prompt_token_ids": list(prompt)}, SamplingParams(**options | sampling)
        )
        return name

    def step(self) -> dict[str, list[int]]:
        """Return what a step gave to each request."""
        return {o.request_id: list(o.outputs[0].token_ids) for o in self.engine.step()}

    def texts(self, prompts, new_tokens=24, **sampling) -> list[list[int]]:
        """Return the new tokens of some prompts, all asked for at once."""
        names = [self.add(prompt, new_tokens, **sampling) for prompt in prompts]
        texts: dict[str, list[int]] = {name: [] for name in names}
        while self.engine.has_unfinished_requests():
            for name, tokens in self.step().items():
                texts[name] += tokens
        return [texts[name] for name in names]

    def acceptance(self, prompt, new_tokens=24) -> dict[str, int]:
        """Return what vLLM says of one request's drafts."""
        self.add(prompt, new_tokens)
        while self.engine.has_unfinished_requests():
            last = self.engine.step()
        return last[0].outputs[0].spec_decode_metrics.to_dict()

    def logprobs(self, prompt, new_tokens=24) -> tuple[list[int], list[float]]:
        """Return the new tokens of a prompt, and their log-probabilities."""
        self.add(prompt, new_tokens, logprobs=0)
        text, found = list[int](), list[float]()
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                (one,) = output.outputs
                text += one.token_ids
                pairs = zip(one.token_ids, one.logprobs, strict=True)
                found += [of_step[token].logprob for token, of_step in pairs]
        return text, found

    def layers(self) -> list[torch.nn.Module]:
        """Return the attention layers of the model."""
        (found,) = self.engine.collective_rpc(_layers)
        return found

    def count(self, metric: str) -> float:
        """Return a counter of vLLM's."""
        return sum(one.value for one in self.engine.get_metrics() if one.name == f"vllm:{metric}")


def _layers(worker) -> list[torch.nn.Module]:
    context = worker.model_runner.compilation_config.static_forward_context
    return list(context.values())


class Expected:
    """Greedy texts by transformers, whose attention is torch's own."""

    def __init__(self):
        self.model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
        self._known = {}

    def __call__(self, prompt, new_tokens=24) -> list[int]:
        key = (*prompt, -new_tokens)
        if key not in self._known:
            ids = torch.tensor([prompt])
            text = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
                eos_token_id=None,
            )
            self._known[key] = text[0, len(prompt) :].tolist()
        return self._known[key]


def prompt_of(length: int, seed: int) -> list[int]:
    """Return tokens of which some runs come again, as in a text."""
    generator = torch.Generator().manual_seed(seed)
    runs = torch.randint(1, 4096, (8, 12), generator=generator)
    order = torch.randint(0, 8, (length // 12 + 1,), generator=generator)
    return runs[order].flatten()[:length].tolist()

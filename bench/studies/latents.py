"""Measure what reading latents in place gains over expanding them: a random model, token by token.

    python bench/studies/latents.py --dtype float32 --threads 2 --json out.jsonl

The model has the sizes of DeepSeek-V2-Lite and fewer layers; its weights are random, so its text
means nothing, and what a token takes does not depend on it. transformers' `generate` (SDPA) and
plain decoding continue one text of random tokens that both have in their caches, in turn.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.arguments import Parser
from common.clock import paired_ratio
from common.records import Record
from common.tables import size
from decoding import models
from decoding.runs import run, run_transformers

from specattn.decoding import METHODS, Target
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.decoding.model.parts import parts_of
from studies import study

LITE = {  # deepseek-ai/DeepSeek-V2-Lite, config.json
    "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40, "mscale": 0.707,
        "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


class Latents(study.Study):
    """A cell is a context, with one row."""

    defaults = {"dtype": "float32", "context": [4096], "new_tokens": 12, "repeats": 3} | {
        "threads": 2, "seed": 0
    }  # fmt: skip
    cells = ("context",)
    header = (
        ("context", ">"), ("transformers, ms", ">"), ("plain, ms", ">"), ("times", ">"),
        ("prefill s", ">"), ("cache, MB", ">"), ("copied weights, MB", ">"), ("same text", "<"),
    )  # fmt: skip

    @classmethod
    def add_arguments(cls, parser: Parser) -> None:
        """Add how deep the model is."""
        parser.add_argument("--layers", type=int, default=4, metavar="N", help="of the model")

    @cached_property
    def model(self) -> Any:
        """The model; experts' weights are blocks of random numbers that repeat."""
        layers, dtype = self.options.layers, models.DTYPES[self.options.dtype]
        with torch.device("meta"):
            model = DeepseekV2ForCausalLM(DeepseekV2Config(**LITE, num_hidden_layers=layers))
        generator = torch.Generator().manual_seed(self.options.seed)
        block = torch.randn(2**24, generator=generator).mul_(0.02).to(dtype)
        model = model.to(dtype).to_empty(device="cpu").eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.fill_(1.0)
            else:
                for piece in parameter.data.view(-1).split(len(block)):
                    piece.copy_(block[: len(piece)])
        base: Any = model.model
        base.rotary_emb = type(base.rotary_emb)(model.config)
        model.generation_config.eos_token_id = None
        return model

    @torch.no_grad()
    def measure(self, place: Record) -> Iterator[Record]:
        """Yield the row of a context."""
        options, model = self.options, self.model
        generator = torch.Generator().manual_seed(options.seed)
        prompt = torch.randint(LITE["vocab_size"], (place["context"],), generator=generator)
        target = Target(model, 1, place["context"] + options.new_tokens)
        snapshot, plain = PromptSnapshot(target, [prompt]), METHODS["plain"]()
        cached = target.cache.nbytes
        seconds: dict[str, list[float]] = {"transformers": [], "plain": []}
        for _ in range(options.repeats):
            theirs = run_transformers(snapshot, options.new_tokens, 0.0, 0)
            ours = run(snapshot, plain, options.new_tokens, 0.0, 0)
            seconds["transformers"].append(1 / theirs.tokens_per_second)
            seconds["plain"].append(1 / ours.tokens_per_second)
        copied = [layer.attention.k_up.nbytes for layer in parts_of(model).layers]
        yield {
            **{name: statistics.median(found) for name, found in seconds.items()},
            "times": paired_ratio(seconds["plain"], seconds["transformers"]),
            "prefill": snapshot.prefill_seconds,
            "cache_bytes": cached,
            "copied_bytes": sum(copied),
            "same_text": ours.tokens == theirs.tokens,
            "layers": options.layers,
            "dtype": options.dtype,
            "how": target.runner.how,
        }

    def row(self, record: Record) -> tuple[str, ...]:
        """Return a record as a line of the table."""
        return (
            size(record["context"]),
            f"{record['transformers'] * 1e3:.0f}",
            f"{record['plain'] * 1e3:.0f}",
            f"{record['times']:.1f}",
            f"{record['prefill']:.1f}",
            f"{record['cache_bytes'] / 1e6:.1f}",
            f"{record['copied_bytes'] / 1e6:.1f}",
            "yes" if record["same_text"] else "no",
        )


main = partial(study.run, Latents)
if __name__ == "__main__":
    sys.exit(main())

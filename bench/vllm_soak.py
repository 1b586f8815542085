"""Send thousands of requests through one vLLM with a drafter; say if memory grew or any got stuck.

    SPECATTN_VLLM=1 .venv-vllm/bin/python bench/vllm_soak.py --requests 2000

Requests of 20 to 600 tokens come as others end, up to 16 at once over a cache that is too small for
all, so that some are preempted; every twentieth is given up. Prompts repeat themselves and each
other, in parts. A request is stuck if it is not done after the steps that 16 of the longest take.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import psutil
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"
AT_ONCE = 16
NEW_TOKENS = 48
LONGEST = 600
BLOCKS, BLOCK_BYTES = 32, 128 * 2 * 6 * 2 * 64 * 4  # of 128 tokens: keys and values, layers, heads
PARTS = 20  # of a run, behind each of which memory is noted
STUCK = 4 * AT_ONCE * NEW_TOKENS  # steps


def engine_of(drafter: str, drafted: int) -> LLMEngine:
    """Return an engine whose cache is too small for 16 of the longest requests."""
    drafting = {"method": "custom_class", "model": drafter, "num_speculative_tokens": drafted}
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(TINY),
            dtype="float32",
            max_model_len=1024,
            max_num_batched_tokens=256,
            max_num_seqs=AT_ONCE,
            kv_cache_memory_bytes=BLOCKS * BLOCK_BYTES,
            skip_tokenizer_init=True,
            speculative_config=drafting if drafter else None,
            enforce_eager=True,
            disable_log_stats=False,
            seed=0,
        )
    )


class Traffic:
    """Requests that come and go, told apart by number."""

    def __init__(self, engine: LLMEngine, seed: int):
        self.engine, self.random = engine, random.Random(seed)
        self.runs = [[self.random.randrange(1, 4096) for _ in range(16)] for _ in range(200)]
        self.begun: dict[str, int] = {}  # the step in which each came
        self.step = self.asked = self.given_up = 0

    def add(self) -> None:
        """Add a request; every fourth samples."""
        length = self.random.randrange(20, LONGEST)
        prompt = [token for _ in range(length // 16 + 1) for token in self.random.choice(self.runs)]
        options = SamplingParams(
            temperature=float(self.asked % 4 == 3),
            max_tokens=self.random.randrange(1, NEW_TOKENS),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = str(self.asked)
        self.engine.add_request(name, {"prompt_token_ids": prompt[:length]}, options)
        self.begun[name] = self.step
        self.asked += 1

    def go_on(self) -> None:
        """Take a step; give a request up now and then."""
        self.step += 1
        for output in self.engine.step():
            if output.finished:
                self.begun.pop(output.request_id, None)
        if self.asked % 20 == 19 and self.begun and self.given_up < self.asked // 20:
            name = self.random.choice(list(self.begun))
            self.engine.abort_request([name])
            del self.begun[name]
            self.given_up += 1

    @property
    def stuck(self) -> list[str]:
        """The requests that wait for too long."""
        return [name for name, begun in self.begun.items() if self.step - begun > STUCK]


def main() -> int:
    """Run the requests; return 1 where memory grew or one was stuck."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--drafter", default="specattn.integrations.vllm.Auto")
    parser.add_argument("--drafted", type=int, default=15)
    parser.add_argument("--grows", type=float, default=8.0, help="MiB allowed over the second half")
    options = parser.parse_args()
    traffic = Traffic(engine_of(options.drafter, options.drafted), seed=0)
    process, begun = psutil.Process(), time.perf_counter()
    held = [process.memory_info().rss / 2**20]
    every = max(1, options.requests // PARTS)
    while traffic.begun or traffic.asked < options.requests:
        while len(traffic.begun) < 2 * AT_ONCE and traffic.asked < options.requests:
            traffic.add()
        traffic.go_on()
        if traffic.asked >= every * len(held):  # several may have come in this step
            held.append(process.memory_info().rss / 2**20)
            print(f"{traffic.asked} requests, {held[-1]:.1f} MiB", flush=True)
        if traffic.stuck:
            break
    counts = {one.name: one.value for one in traffic.engine.get_metrics() if hasattr(one, "value")}
    grown = held[-1] - held[len(held) // 2]
    found = {
        "requests": traffic.asked,
        "given_up": traffic.given_up,
        "steps": traffic.step,
        "seconds": round(time.perf_counter() - begun, 1),
        "preempted": counts.get("vllm:num_preemptions"),
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens"),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens"),
        "MiB by parts": [round(one, 1) for one in held],
        "MiB grown over the second half": round(grown, 1),
        "stuck": traffic.stuck,
    }
    print(json.dumps(found))
    return int(bool(traffic.stuck) or grown > options.grows)


if __name__ == "__main__":
    sys.exit(main())

"""One run: a method, or a peer, continues what a ready target has read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import Cache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from specattn.decoding import Method, Statistics
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.peak_memory import peak_bytes, reset_peak

from .cases import UNSHAPED, Shaping
from .peers.process import Peer


class Reached(NamedTuple):
    """Where a run stood when it had reached a length."""

    length: int  # asked for; the round that reached it may have gone further
    tokens: int  # up to the end of that round
    rounds: int
    seconds: float  # since decoding began


@dataclass
class Outcome:
    """What one run gave.

    The peak is the largest memory during the run, with weights and caches: allocated by torch on a
    GPU, resident in the process on a CPU.
    """

    tokens: list[list[int]]  # new ones of every request
    tokens_per_second: float  # of all requests together, without prefill
    statistics: Statistics | None  # None for a peer, which keeps none
    peak_bytes: int | None
    first_seconds: float = 0.0  # from a ready cache to the first new token, where prefill is ours
    passes: int | None = None  # of a peer that tells them
    reached: list[Reached] = field(default_factory=list)  # a single request's alone


def run(
    snapshot: PromptSnapshot,
    method: Method,
    new_tokens: int,
    temperature: float,
    seed: int,
    shaping: Shaping = UNSHAPED,
    lengths: Sequence[int] = (),
) -> Outcome:
    """Decode `new_tokens` for every prompt with the real loop; an end of text ends nothing."""
    clock = _LengthClock(lengths if len(snapshot.prompts) == 1 else ())
    reset_peak(snapshot.target.device)
    tokens, statistics = snapshot.run(
        method,
        new_tokens,
        shaping.processors(temperature),
        do_sample=temperature > 0,
        seed=seed,
        on_tokens=clock.note,
    )
    speed, peak = statistics.tokens_per_second, peak_bytes(snapshot.target.device)
    return Outcome(tokens, speed, statistics, peak, clock.first, reached=clock.reached)


def run_transformers(
    snapshot: PromptSnapshot,
    new_tokens: int,
    temperature: float,
    seed: int,
    shaping: Shaping = UNSHAPED,
) -> Outcome:
    """Decode with transformers' own `generate`: SDPA, dynamic cache, filled as ours is.

    The clock starts at the first new token, so that neither its preparation nor ours counts.
    """
    snapshot.restore()
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(seed)
    reset_peak(snapshot.target.device)
    sampling["logits_processor"] = shaping.processors(1.0)
    model, cache = snapshot.target.model, snapshot.as_dynamic_cache()
    tokens, moments = generate(model, snapshot.prompts, cache, new_tokens, "sdpa", **sampling)
    speed = len(snapshot.prompts) * (new_tokens - 1) / (moments[-1] - moments[0])
    return Outcome(tokens, speed, None, peak_bytes(snapshot.target.device))


def generate(
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    cache: Cache,
    new_tokens: int,
    attention: str,
    **sampling: Any,
) -> tuple[list[list[int]], list[float]]:
    """Return what `model.generate` writes behind a filled cache, and when each token came."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    clock, ids = _Clock(model.device), torch.stack(list(prompts)).to(model.device)
    try:
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new_tokens,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
            **sampling,
        )
    finally:
        model.set_attn_implementation(before)
    return output[:, ids.shape[1] :].tolist(), clock.moments


def run_peer(peer: Peer, prompt: torch.Tensor, new_tokens: int) -> Outcome:
    """Decode greedily with an engine of another process, which has read the prompt before."""
    cpu = torch.device("cpu")
    reset_peak(cpu, peer.pid)
    answer = peer.generate(prompt.tolist(), new_tokens)
    peak, passes = peak_bytes(cpu, peer.pid), len(answer.arrivals)
    return Outcome([answer.tokens], answer.tokens_per_second, None, peak, passes=passes)


class _LengthClock:
    """Note when the first token comes, and when a request reaches each of some lengths."""

    def __init__(self, lengths: Sequence[int]):
        self.left, self.reached = sorted(lengths), list[Reached]()
        self.start, self.tokens, self.rounds = time.perf_counter(), 0, 0
        self.first = 0.0

    def note(self, request: int, tokens: list[int]) -> None:
        seconds = time.perf_counter() - self.start
        self.first = self.first or seconds
        self.rounds, self.tokens = self.rounds + 1, self.tokens + len(tokens)
        while self.left and self.tokens >= self.left[0]:
            self.reached.append(Reached(self.left.pop(0), self.tokens, self.rounds, seconds))


class _Clock(StoppingCriteria):
    """Note the time after every token; stop nothing."""

    def __init__(self, device: torch.device):
        self.device, self.moments = device, list[float]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.moments.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

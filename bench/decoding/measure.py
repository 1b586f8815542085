"""Measure a group: every method from the same cache, in turn, and all samples kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from specattn.decoding import Target
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.machine_load import Others
from specattn.planning import AcceptanceProfile

from .cases import PLAIN, TRANSFORMERS, UNSHAPED, Group
from .grounded import Grounded
from .identity import Difference, explain, first_difference
from .peers.engines import ENGINES
from .peers.process import Answer, Peer, Peers
from .rows import DecodeRow, relate
from .runs import Outcome, run, run_peer, run_transformers
from .targets import ReferenceTarget, SimulatedTarget
from .texts import Texts

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class MeasurePlan:
    """How a group is measured."""

    new_tokens: int = 128  # per request and run; an end of text ends nothing
    texts: int = 2  # different prompts per request; acceptance is pooled over them
    repeats: int = 3  # timed runs of every method on each text, after a short one to warm up
    seed: int = 0  # of the first repeat; the others follow
    lengths: tuple[int, ...] = ()  # new tokens at which a single request's progress is noted

    def runs(self, group: Group) -> int:
        """Return how many runs a group takes, to warm up or timed."""
        return self.texts * (1 + self.repeats) * len(group.entries)


def measure(
    model: PreTrainedModel,
    texts: Texts | Grounded,
    group: Group,
    plan: MeasurePlan,
    profile: AcceptanceProfile | None,
    advance: Callable[[str], None],
    defaults: Mapping[str, Mapping[str, Any]],
    peers: Peers | None = None,
    referenced: bool = False,
    kv_dtype: str | None = None,
) -> list[DecodeRow]:
    """Measure all entries of a group.

    With a profile the cache holds random numbers and acceptance is simulated. ``advance`` is called
    with a name before every run; ``defaults`` are options by method; ``peers`` start the
    engines among the entries. With ``referenced`` the continuations that the texts have in writing
    play the target. ``kv_dtype`` is `Target`'s. Interrupted, it marks as ``cut`` the rows that lack
    runs, and returns.
    """
    rows = [DecodeRow(entry, group) for entry in group.entries]
    engines = [row for row in rows if row.entry.name in ENGINES]
    methods = {row.entry.label: row.entry.build(defaults) for row in rows if row.entry.is_ours}
    running = {
        row.entry.label: _tried(
            row, peers.get, ENGINES[row.entry.name], row.entry.label, row.entry.options
        )
        for row in engines
    }
    for row in engines:
        row.peer = None if row.fault else running[row.entry.label].ready
    room = plan.new_tokens + max((method.max_nodes for method in methods.values()), default=1)
    plainly = kind = partial(Target, kv_dtype=kv_dtype)
    if profile is not None:
        kind = partial(SimulatedTarget, profile=profile, seed=plan.seed)

    def decode(row: DecodeRow, snapshot: PromptSnapshot, new_tokens: int, seed: int) -> Outcome:
        label, options = row.entry.label, (new_tokens, group.temperature, seed, group.shaping)
        if label in running:
            return run_peer(running[label], snapshot.prompts[0], new_tokens)
        if row.entry.name == TRANSFORMERS:
            return run_transformers(snapshot, *options)
        return run(snapshot, methods[label], *options, plan.lengths)

    def run_all(snapshot: PromptSnapshot) -> None:
        for repeat in range(-1, plan.repeats):  # the first one warms up
            new_tokens = min(plan.new_tokens, WARM_UP_TOKENS) if repeat < 0 else plan.new_tokens
            first = repeat % len(rows)
            for row in [*rows[first:], *rows[:first]]:  # none is always the first
                advance(row.entry.label)
                outcome = _tried(row, decode, row, snapshot, new_tokens, plan.seed + repeat)
                if repeat >= 0 and outcome is not None:
                    row.outcomes.append(outcome)

    others, left = Others([peer.pid for peer in running.values() if peer]), rows
    for text in range(plan.texts):
        prompts = texts.prompts(text, group.context, group.batch)
        if not text and profile is None:  # a first pass is slower than those that follow
            PromptSnapshot(plainly(model, 1, WARM_UP_TOKENS), [prompts[0][:WARM_UP_TOKENS]])
        if referenced:
            references = written(texts, text, group, plan)
            kind = partial(ReferenceTarget, references=references)
        target = kind(model, len(prompts), len(prompts[0]) + room)
        snapshot = PromptSnapshot(target, prompts, readers=methods.values())
        for row in engines:  # reads a text that it has not seen, up to its first new token
            if (answer := _tried(row, _read, running[row.entry.label], prompts[0])) is not None:
                row.prefill_seconds.append(answer.first_seconds)
        try:
            run_all(snapshot)
        except KeyboardInterrupt:
            for row in rows:
                row.cut = not row.fault and len(row.outcomes) < plan.texts * plan.repeats
            left = [row for row in rows if not row.cut]
        for row in left:
            if profile is None and row not in engines:  # noise is no prefill
                row.prefill_seconds.append(snapshot.prefill_seconds)
        if referenced:
            _hold_against(left, references, target, plan.repeats)
        elif profile is None and group.temperature == 0 and group.shaping == UNSHAPED:
            _compare(left, partial(plainly, model), prompts, text, plan.repeats)
        if left is not rows:
            break
    cores = others.cores()
    for row in rows:
        row.others = cores
    relate(left)
    return rows


def _tried(row: DecodeRow, call: Callable, *given: Any) -> Any:
    """Return what a call gives; one that fails is a fault of its row, and costs no other."""
    if row.fault is not None:
        return None
    try:
        return call(*given)
    except Exception as failure:
        row.fault = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return None


def _read(peer: Peer, prompt: torch.Tensor) -> Answer:
    return peer.generate(prompt.tolist(), 1, cold=True)


def written(texts: Grounded, text: int, group: Group, plan: MeasurePlan) -> list[torch.Tensor]:
    """Return what is written to follow a group's prompts; raises ValueError where it is short."""
    found = texts.references(text, group.context, group.batch)
    if (least := min(map(len, found))) < plan.new_tokens:
        raise ValueError(
            f"--new-tokens: a reference has {least} tokens, fewer than {plan.new_tokens}"
        )
    return [one[: plan.new_tokens] for one in found]


def _hold_against(
    rows: Sequence[DecodeRow],
    references: Sequence[torch.Tensor],
    target: ReferenceTarget,
    repeats: int,
) -> None:
    """Make a fault of a text that is not the reference; note how often the model agrees with it."""
    expected = [one.tolist() for one in references]
    for row in rows:
        row.agreement.append(target.agreement)
        if row.fault is None and any(one.tokens != expected for one in row.outcomes[-repeats:]):
            row.fault = "the text is not the reference"


def _compare(
    rows: Sequence[DecodeRow],
    make: Callable[[int, int], Target],
    prompts: Sequence[torch.Tensor],
    text: int,
    repeats: int,
) -> None:
    """Hold the greedy text of every row against plain decoding's, and explain each difference."""
    plain = next((row for row in rows if row.entry.name == PLAIN), None)
    if plain is None or plain.fault:
        return
    expected = plain.outcomes[text * repeats].tokens
    for row in rows:
        another = not row.entry.is_ours and "weights" in row.entry.options  # model's text
        if row is plain or row.fault or another:
            continue
        for request, tokens in enumerate(row.outcomes[text * repeats].tokens):
            row.compared += 1
            place = first_difference(expected[request], tokens)
            if place is not None:
                found = explain(make, prompts[request], expected[request], tokens, place)
                row.differences.append(Difference(text, request, place, *found))

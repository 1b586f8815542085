"""Measure specattn inside vLLM against vLLM as it is: in turn, each in a process of its own.

    python bench/engines.py --quick
    python bench/engines.py --check plain --check drafter --context 4k,16k --json engines.jsonl

Greedy decoding of the embedded target. Every figure is a ratio with stock vLLM = 1, larger is
better. `docs/vllm.md` says what the checks are, and what was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from common.arguments import Parser
from common.clock import paired_ratio, spread
from common.records import Record
from common.tables import or_dash, size
from decoding.peers.engines import ENGINES
from decoding.peers.process import Peer, Peers
from decoding.texts import Files, held_out_files
from studies import study
from tokenizers import Tokenizer

from specattn.machine_load import Others, used_by
from specattn.planning.models import EMBEDDED_TARGET

STOCK = ENGINES["vllm"]
PLUGIN = {"SPECATTN_VLLM": "1", "VLLM_PLUGINS": "specattn"}
SPECATTN = replace(STOCK, environment=lambda *given: STOCK.environment(*given) | PLUGIN)
Variants = dict[str, tuple[Any, dict[str, Any]]]
"""What is compared: an engine with its settings, by name."""
NGRAM = {"ngram": 7}
DRAFTERS: Variants = {
    name: (SPECATTN, {"drafter": f"specattn.integrations.vllm.{name}", "drafted": drafted})
    for name, drafted in (("Auto", 15), ("PromptLookup", 7), ("Suffix", 15), ("Vegas", 6))
}
CAPACITY = 32 * 1024
LONGEST = 31 * 1024
SPARE = 256  # positions for new tokens
BARS = {  # by check and context: what the plugin is to reach
    "plain": {512: 0.98, 4096: 1.0, 16384: 1.1, LONGEST: 1.2},
    "ngram": {4096: 1.0, LONGEST: 1.6},
    "drafter": {4096: 1.2, 16384: 1.5, LONGEST: 2.0},
    "first token": {LONGEST: 1.3},
}
COMPARED: dict[str, Variants] = {
    "plain": {"vLLM": (STOCK, {}), "specattn": (SPECATTN, {})},
    "ngram": {"vLLM": (STOCK, NGRAM), "specattn": (SPECATTN, NGRAM)},
    "drafter": {"vLLM": (STOCK, {}), **DRAFTERS},
    "first token": {"vLLM": (STOCK, {}), "specattn": (SPECATTN, {})},
}
CHECKS = ("identity", *BARS)
QUICK = 4096  # longest prompt of a quick run


class Engines(study.Study):
    """A cell is a check at a context: a row per variant, beside stock vLLM."""

    defaults = {"context": None, "dtype": "float32", "threads": 2, "repeats": 5} | {
        "new_tokens": 64, "seed": 0
    }  # fmt: skip
    header = (
        ("check", "<"), ("variant", "<"), ("context", ">"), ("against vLLM = 1", ">"), ("bar", ">"),
        ("by processor time", ">"), ("ms: specattn, vLLM", ">"), ("spread", ">"),
        ("texts alike", ">"),
    )  # fmt: skip

    @classmethod
    def add_arguments(cls, parser: Parser) -> None:
        """Add checks, and the option to be quick."""
        parser.add_argument("--check", action="append", choices=CHECKS, help="all unless given")
        parser.add_argument("--quick", action="store_true", help="prompts of 4k at most")

    def __init__(self, options: Any):
        if reason := STOCK.why_not():
            raise ValueError(reason)
        super().__init__(options)
        tokenizer = Tokenizer.from_file(str(EMBEDDED_TARGET / "tokenizer.json"))
        encode = lambda text: {"input_ids": tokenizer.encode(text).ids}  # noqa: E731
        self.texts = Files(encode, held_out_files())
        self.longest = QUICK if options.quick else LONGEST
        self.check, self.started = "", self.peers()

    def places(self) -> list[Record]:
        """Return every check at its contexts; texts are compared at all lengths at once."""
        contexts = {
            check: [n for n in self.options.context or BARS.get(check, ()) if n <= self.longest]
            for check in self.options.check or CHECKS
        }
        contexts |= {"identity": [self.longest]} if "identity" in contexts else {}
        return [{"check": check, "context": n} for check, found in contexts.items() for n in found]

    def measure(self, place: Record) -> Iterator[Record]:
        """Compare texts, or time variants and stock vLLM in turn."""
        check, context = place["check"], place["context"]
        if check != self.check:  # its engines serve all its contexts
            self.close()
            self.check = check
        if check == "identity":
            yield from self.identity()
            return
        running = {
            name: self.started.get(engine, f"{name} timed", settings)
            for name, (engine, settings) in COMPARED[check].items()
        }
        yield from self.timed(running, context, cold=check == "first token")

    def row(self, record: Record) -> list[str]:
        """Return the ratios of a row beside its bar."""
        alike = f"{record['identical']} of {record['of']}"
        cells = [record["check"], record["variant"], size(record["context"])]
        if "ratio" not in record:
            return [*cells, "", "", "", "", "", alike]
        bar = BARS[record["check"]].get(record["context"])
        return [
            *cells,
            f"{record['ratio']:.2f}",
            f"{bar:.2f}" if bar else "",
            or_dash(record["ratio_of_processor_time"]),
            f"{record['seconds'] * 1e3:.2f}, {record['stock_seconds'] * 1e3:.2f}",
            f"{record['spread']:.0%}",
            alike,
        ]

    def status(self, records: list[Record]) -> int:
        """Return 1 where a text differs."""
        return int(any(row["identical"] != row["of"] for row in records))

    def close(self) -> None:
        """End the engines."""
        self.started.__exit__()

    def identity(self) -> Iterator[Record]:
        """Compare greedy texts of batches of 1 to 8 prompts of mixed lengths."""
        lengths = _spaced(20, self.longest, 40)
        prompts = [self.prompt(number, length) for number, length in enumerate(lengths)]
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
        found: dict[str, list[list[int]]] = {}
        for name, (engine, settings) in (COMPARED["plain"] | DRAFTERS).items():
            with self.peers() as peers:
                peer = peers.get(engine, f"{name} identity", {"requests": 8, **settings})
                found[name] = [text for batch in _batches(order) for text in peer.texts(
                    [prompts[i] for i in batch], self.options.new_tokens)[0]]  # fmt: skip
        stock = found.pop("vLLM")
        for name, texts in found.items():
            same = sum(a == b for a, b in zip(stock, texts, strict=True))
            yield {"variant": name, "identical": same, "of": len(order)}

    def timed(self, peers: dict[str, Peer], context: int, cold: bool) -> Iterator[Record]:
        """Yield how every variant stands to stock vLLM at a context."""
        prompt = self.prompt(self.options.seed, context)
        new_tokens = 1 if cold else self.options.new_tokens
        seconds: dict[str, list[float]] = {name: [] for name in peers}
        processors: dict[str, list[float]] = {name: [] for name in peers}
        texts: dict[str, list[int]] = {}
        others = Others([peer.pid for peer in peers.values()])
        if not cold:  # what was read before is not read again
            for peer in peers.values():
                peer.generate(prompt, 1)
        for _ in range(self.options.repeats):
            for name, peer in peers.items():
                before = used_by(peer.pid)
                answer = peer.generate(prompt, new_tokens, cold=cold)
                processors[name].append(used_by(peer.pid) - before)
                took = answer.first_seconds if cold else 1 / answer.tokens_per_second
                seconds[name].append(took)
                texts[name] = answer.tokens
        busy, stock = others.cores(), seconds["vLLM"]
        counted = all(all(samples) for samples in processors.values())  # a tick is 10 ms
        for name in (name for name in peers if name != "vLLM"):
            yield {
                "variant": name,
                "ratio": paired_ratio(seconds[name], stock),
                "ratio_of_processor_time": paired_ratio(processors[name], processors["vLLM"])
                if counted
                else None,
                "seconds": median(seconds[name]),
                "stock_seconds": median(stock),
                "spread": max(spread(seconds[name]), spread(stock)),
                "repeats": self.options.repeats,
                "others": busy,
                "identical": int(texts[name] == texts["vLLM"]),
                "of": 1,
            }

    def prompt(self, number: int, length: int) -> list[int]:
        """Return a prompt of held-out source code."""
        return self.texts.prompts(number, length, 1)[0].tolist()

    def peers(self) -> Peers:
        """Return what starts engines, for a ``with`` block."""
        capacity = min(CAPACITY, self.longest + SPARE)
        return Peers(EMBEDDED_TARGET, self.options.dtype, self.options.threads, capacity)


def _spaced(first: int, last: int, count: int) -> list[int]:
    """Return lengths from first to last, each longer than the one before by the same factor."""
    step = (last / first) ** (1 / (count - 1))
    return [round(first * step**i) for i in range(count)]


def _batches(order: list[int]) -> Iterator[list[int]]:
    """Yield batches of 1, 2, ... 8, 1, ... until all are used."""
    wanted = 1
    while order:
        yield order[:wanted]
        order, wanted = order[wanted:], wanted % 8 + 1


main = partial(study.run, Engines)
if __name__ == "__main__":
    sys.exit(main())

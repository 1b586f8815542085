"""`Auto` in vLLM against vLLM as it is, and against the single drafters: cells, all in turn.

    python bench/studies/auto_in_vllm.py --context 512,4k --json cells.jsonl
    python bench/studies/auto_in_vllm.py --at-once 16 --context 512

A cell is a context, code or prose, and a temperature; every engine is a process of its own. Prompts
were read before. Code is held out of the embedded target's training, prose is this project's
documentation. (docs/vllm.md)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import arguments
from common.machine import REPOSITORY
from common.records import Record
from common.tables import size
from decoding.peers.process import Peer, Peers
from decoding.texts import Files, held_out_files
from engines import DRAFTERS, SPECATTN, STOCK
from tokenizers import Tokenizer

from specattn.machine_load import Others, used_by
from specattn.planning.models import EMBEDDED_TARGET
from studies import study

KINDS = ("code", "prose")
SPARE = 256  # positions beyond prompt and new tokens


class AutoInVllm(study.Study):
    """A cell has tokens per second of every engine."""

    defaults = {"model": EMBEDDED_TARGET, "context": [512, 4096], "temperature": [0.0, 1.0]} | {
        "new_tokens": 256, "repeats": 5, "threads": 2, "dtype": "float32", "seed": 0
    }  # fmt: skip
    cells, kind = ("context", "text", "temperature"), "cell"
    header = (
        ("context", ">"), ("text", "<"), ("T", ">"), ("at once", ">"), ("ms per token: plain", ">"),
        ("Auto", ">"), ("x plain", ">"), ("x best", ">"), ("best other", "<"), ("alike", ">"),
    )  # fmt: skip

    @classmethod
    def add_arguments(cls, parser: arguments.Parser) -> None:
        """Add how many requests run at once."""
        parser.add_argument("--at-once", type=arguments.number, default=1, metavar="N")
        parser.add_argument(
            "--only",
            action="append",
            choices=("Plugin", *DRAFTERS),
            metavar="NAME",
            help="beside vLLM and Auto",
        )

    def __init__(self, options: Any):
        if reason := STOCK.why_not():
            raise ValueError(reason)
        super().__init__(options)
        options.text = KINDS
        tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        encode = lambda text: {"input_ids": tokenizer.encode(text).ids}  # noqa: E731
        pages = sorted(REPOSITORY.glob("docs/*.md"), key=lambda page: page.stat().st_size)
        self.texts = {"code": Files(encode, held_out_files()), "prose": Files(encode, pages[::-1])}
        capacity = max(options.context) + options.new_tokens + SPARE
        self.peers = Peers(options.model, options.dtype, options.threads, capacity)

    def engines(self) -> dict[str, Peer]:
        """Return the running engines, started when first asked for."""
        compared = {"vLLM": (STOCK, {}), "Plugin": (SPECATTN, {}), **DRAFTERS}
        wanted = self.options.only or [name for name in compared if name != "Plugin"]
        return {
            name: self.peers.get(
                engine, f"{name} auto", {"requests": self.options.at_once, **given}
            )
            for name, (engine, given) in compared.items()
            if name in ("vLLM", "Auto") or name in wanted
        }

    def measure(self, place: Record) -> Iterator[Record]:
        """Run all engines in turn, in an order that changes with every repeat."""
        engines, count, temperature = self.engines(), self.options.at_once, place["temperature"]
        texts = self.texts[place["text"]].prompts(self.options.seed, place["context"], count)
        prompts = [text.tolist() for text in texts]
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        processors: dict[str, list[float]] = {name: [] for name in engines}
        alike = dict.fromkeys(engines, 0)
        others = Others([peer.pid for peer in engines.values()])
        for engine in engines.values():  # vLLM 0.32 fails where it reads a seeded prompt in pieces
            engine.texts(prompts, 1)
        for repeat in range(self.options.repeats + 1):
            sampling = {"temperature": temperature, "seed": repeat} if temperature else {}
            found = {}
            for name in list(engines)[:: 1 if repeat % 2 else -1]:
                before = used_by(engines[name].pid)
                found[name], took = self.run(engines[name], prompts, sampling)
                if repeat:
                    seconds[name].append(took)
                    processors[name].append(used_by(engines[name].pid) - before)
            for name, texts in found.items():
                alike[name] += texts == found["vLLM"]
        yield {
            "at_once": count,
            "ms_per_token": {name: 1e3 * median(times) for name, times in seconds.items()},
            "processor_seconds": {name: median(times) for name, times in processors.items()},
            "alike": alike,
            "of": self.options.repeats + 1,
            "repeats": self.options.repeats,
            "others": others.cores(),
        }

    def run(self, peer: Peer, prompts: list[list[int]], sampling: Record) -> tuple[Any, float]:
        """Return new tokens, and the seconds that one took, of requests at once or of a single one.

        Of a single one that of decoding; of several, with the last piece of each prompt.
        """
        count = self.options.new_tokens
        if len(prompts) > 1:
            texts, took = peer.texts(prompts, count, **sampling)
            return texts, took / (count * len(prompts))
        answer = peer.generate(prompts[0], count, **sampling)
        return answer.tokens, 1 / answer.tokens_per_second

    def row(self, record: Record) -> tuple[str, ...]:
        """Return how `Auto` stands to plain vLLM, and to the best other engine."""
        took = dict(record["ms_per_token"])
        own = took.pop("Auto")
        best = min(took, key=lambda name: took[name])
        return (
            size(record["context"]),
            record["text"],
            f"{record['temperature']:g}",
            str(record["at_once"]),
            f"{took['vLLM']:.2f}",
            f"{own:.2f}",
            f"{took['vLLM'] / own:.2f}",
            f"{took[best] / own:.2f}",
            best,
            ", ".join(f"{name} {count}" for name, count in record["alike"].items()),
        )

    def close(self) -> None:
        """End the engines."""
        self.peers.__exit__()


main = partial(study.run, AutoInVllm)
if __name__ == "__main__":
    sys.exit(main())

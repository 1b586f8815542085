"""The running peers: one process for each that was asked for, idle while others are measured."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.machine import REPOSITORY

from .engines import Engine

FOLDER = REPOSITORY / "build" / "peers"
"""Logs, compiled code and converted checkpoints."""
WARM_UP = [1] * 8  # a prompt, and as many new tokens after it
PATIENCE = 10.0  # seconds that a worker has to end by itself


@dataclass
class Answer:
    """What a peer generated, and when."""

    tokens: list[int]
    arrivals: list[tuple[float, int]]  # seconds since the request, and new tokens until then

    @property
    def first_seconds(self) -> float:
        """Seconds from the request to the first new token."""
        return self.arrivals[0][0]

    @property
    def tokens_per_second(self) -> float:
        """Of all tokens that came after those of the first pass."""
        (begin, already), (end, tokens) = self.arrivals[0], self.arrivals[-1]
        return (tokens - already) / (end - begin)


class Peer:
    """A worker of an engine, started and ready.

    Raises
    ------
    RuntimeError
        The worker did not start, did not answer, or answered with a fault; its log is named.
    """

    def __init__(self, engine: Engine, label: str, settings: dict[str, Any]):
        cache = FOLDER / engine.target
        cache.mkdir(parents=True, exist_ok=True)
        self.label, self.log = label, FOLDER / f"{label.replace(' ', '-')}.log"
        environment = os.environ | engine.environment(engine.venv, cache, settings["threads"])
        environment.pop("PYTHONPATH", None)
        command = [engine.python, engine.worker, "--settings"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, json.dumps(settings | {"cache": str(cache)})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,  # an interrupt is ours, and ends it in its turn
            )
        try:
            self.ready = self._answer()
            self.generate(WARM_UP, len(WARM_UP))
        except BaseException:  # an interrupt while it loads, too
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def generate(
        self, prompt: Sequence[int], new_tokens: int, *, cold: bool = False, **sampling: Any
    ) -> Answer:
        """Continue a prompt; cold, it reads all of it although it read it before.

        Greedily unless `sampling` has a temperature and a seed, which not all engines take.
        """
        given = {"sampling": sampling} if sampling else {}
        found = self._ask(prompt=list(prompt), new_tokens=new_tokens, cold=cold, **given)
        if len(found["tokens"]) != new_tokens:
            raise self._fault(f"expected {new_tokens} tokens, got {len(found['tokens'])}")
        return Answer(found["tokens"], [(at, count) for at, count in found["arrivals"]])

    def texts(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, **sampling: Any
    ) -> tuple[list[list[int]], float]:
        """Continue prompts together, which it must serve as many of; return the seconds, too."""
        given = {"sampling": sampling} if sampling else {}
        prompts = [list(one) for one in prompts]
        found = self._ask(prompts=prompts, new_tokens=new_tokens, **given)
        return found["texts"], found["seconds"]

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise self._fault("it ended") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise self._fault(f"it ended with status {self.process.wait()}")
        found = json.loads(line)
        if "error" in found:
            raise self._fault(found["error"])
        return found

    def _fault(self, what: str) -> RuntimeError:
        return RuntimeError(f"{self.label}: {what}; its log is {self.log}")


@dataclass
class Peers:
    """The peers of a session, each started when it is first needed."""

    model: Path
    dtype: str
    threads: int
    capacity: int  # prompt and new tokens of the longest request
    running: dict[str, Peer] = field(default_factory=dict)

    def get(self, engine: Engine, label: str, options: dict[str, Any]) -> Peer:
        """Return a peer, started and ready; raises RuntimeError where it does not start."""
        if label not in self.running:
            settings = {
                "model": str(self.model.resolve()),
                "dtype": self.dtype,
                "threads": self.threads,
                "capacity": self.capacity,
            }
            self.running[label] = Peer(engine, label, settings | options)
        return self.running[label]

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *exception: object) -> None:
        while self.running:
            self.running.popitem()[1].close()

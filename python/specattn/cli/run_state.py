"""Saves a run and goes on with it later (--state, --resume), and ends it whole on a signal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specattn.cli.errors import interrupt, on_signals
from specattn.cli.terminal import say
from specattn.decoding import StopRequest
from specattn.files import write_atomically

SCHEMA = "specattn.run/2"
SAVED_EVERY = 30.0  # seconds between two states, which is what a kill can cost


@dataclass
class RunState:
    """A text as far as it has come, with all that decides how it goes on.

    A later run reads the text again as a prompt; seed and position decide what is drawn.
    """

    settings: dict[str, Any]  # what the text depends on, ready for JSON
    prompt: list[int]
    path: Path | None = None  # where it is saved, if anywhere
    tokens: list[int] = field(default_factory=list)  # behind the prompt
    resumed_at: int = 0  # tokens that an earlier run has left

    def __post_init__(self) -> None:
        self._saved = time.monotonic()

    def resume(self) -> None:
        """Go on where the file at `path` ends; refuse one of another prompt, model or sampling."""
        try:
            with safe_open(str(self.path), "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("schema") != SCHEMA:
                    raise ValueError(f"{self.path} holds no state of a run ({SCHEMA})")
                prompt, tokens = map(file.get_tensor, ("prompt", "tokens"))
            settings = dict(json.loads(metadata["settings"]))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.path} cannot be read: {error}") from None
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{self.path} is not as --state writes it: {error!r}") from None
        if tokens.dtype != torch.int64 or tokens.dim() != 1 or bool((tokens < 0).any()):
            found = f"{tokens.dtype} of shape {list(tokens.shape)}"
            raise ValueError(f"{self.path}: tokens: expected ids, int64 [new tokens], got {found}")
        if prompt.tolist() != self.prompt:
            raise ValueError(f"{self.path} continues another prompt")
        for name in settings | self.settings:
            value, wanted = settings.get(name), self.settings.get(name)
            if value != wanted:
                raise ValueError(f"{self.path} has {name} {value!r}, not {wanted!r}")
        self.tokens = tokens.tolist()
        self.resumed_at = len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append new tokens; save now and then."""
        self.tokens += tokens
        if time.monotonic() - self._saved > SAVED_EVERY:
            try:
                self.save()
            except OSError as error:  # of a full disk, say, which may have room again later
                self._saved = time.monotonic()
                say(f"warning: {error}", style="yellow")

    def save(self) -> None:
        """Write all of it or nothing; OSError where it cannot be written."""
        if self.path is None:
            return
        tokens = torch.tensor(self.tokens, dtype=torch.int64)
        tensors = {"prompt": torch.tensor(self.prompt), "tokens": tokens}
        metadata = {"schema": SCHEMA, "settings": json.dumps(self.settings)}
        try:
            write_atomically(self.path, lambda partial: save_file(tensors, partial, metadata))
        except (OSError, SafetensorError) as error:
            raise OSError(f"{self.path} cannot be written: {error}") from None
        self._saved = time.monotonic()


class Interruption(StopRequest):
    """Ends a text where it is, once a signal has come."""

    signal: int | None = None


@contextmanager
def interruptible(runs: Sequence[RunState]) -> Iterator[Interruption]:
    """Let the first signal end the texts where they are, and the second the command."""
    request = Interruption()

    def on_signal(number: int, *_: Any) -> None:
        if request.asked or all(len(run.tokens) == run.resumed_at for run in runs):
            interrupt(number)  # before the first new token there is nothing to show
        request.asked, request.signal = True, number

    with on_signals(on_signal):
        yield request

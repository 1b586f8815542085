"""What the model continues: given files, held-out ones of the standard library, random tokens."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specattn.planning.models import EMBEDDED_TARGET


class Files:
    """Prompts read from files of UTF-8: request r of text n begins with file ``n * batch + r``.

    A file that is too short is followed by the next ones; what is no such file is refused.
    """

    def __init__(self, tokenizer: Any, files: Sequence[Path]):
        for path in files:
            if not path.is_file():
                raise ValueError(f"--prompt: {path} is not a file")
        self.tokenizer, self.files = tokenizer, list(files)
        self._tokens: dict[Path, list[int]] = {}

    def prompts(self, number: int, context: int, batch: int) -> list[torch.Tensor]:
        """Return `batch` prompts; raises ValueError where all files together are too short."""
        return [self._from(number * batch + row, context) for row in range(batch)]

    def _from(self, first: int, context: int) -> torch.Tensor:
        tokens: list[int] = []
        for step in range(len(self.files)):
            if len(tokens) >= context:
                break
            tokens += self._read(self.files[(first + step) % len(self.files)])
        if len(tokens) < context:
            raise ValueError(
                f"--context: the files hold {len(tokens)} tokens, fewer than {context}; give more "
                "with --prompt"
            )
        return torch.tensor(tokens[:context])

    def _read(self, path: Path) -> list[int]:
        if path not in self._tokens:
            if (text := _text(path)) is None:
                raise ValueError(f"--prompt: {path} is not UTF-8 text")
            self._tokens[path] = self.tokenizer(text)["input_ids"]
        return self._tokens[path]


class RandomTokens:
    """Prompts that mean nothing, for models that mean nothing."""

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary

    def prompts(self, number: int, context: int, batch: int) -> list[torch.Tensor]:
        """Return `batch` prompts of random tokens, the same for the same number."""
        generator = torch.Generator().manual_seed(number)
        return list(torch.randint(self.vocabulary, (batch, context), generator=generator))


Texts = Files | RandomTokens
"""Prompts of any length: other numbers give other texts."""


@functools.cache
def held_out_files() -> list[Path]:
    """Return files that the embedded target has never seen, longest first."""
    if str(EMBEDDED_TARGET) not in sys.path:
        sys.path.insert(0, str(EMBEDDED_TARGET))
    import corpus

    return [path for path in corpus.held_out_files() if _text(path) is not None]


def _text(path: Path) -> str | None:
    """Return what a file of UTF-8 says; None of another: the library's tests of encodings."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None

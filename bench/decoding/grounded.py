"""Requests over long documents, in LongSpecBench's shape, from files that Python packages ship.

Five kinds: a question over a document, a summary, code to continue, code to edit, free text. The
documents are `pydoc_data.topics` and modules of numpy, torch and transformers, of which the
embedded target has read nothing. Every request has a continuation that was written down: questions,
summaries and free text in ``grounded.json``, of code its own next lines, of an edit the edited
lines.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

WRITTEN = ("question", "summary", "free text")
KINDS = ("question", "summary", "code", "editing", "free text")
MODULES = (
    ("numpy", "ma/core.py"),
    ("torch", "nn/functional.py"),
    ("transformers", "modeling_utils.py"),
)
_PASSAGE = 6000  # characters of code that an edit is about, more than are generated
_EVERYDAY = {"self", "None", "True", "False", "return", "else", "with", "from", "import", "elif"}


class Grounded:
    """Prompts of a kind, of `KINDS`, with their written continuations: three different ones."""

    def __init__(self, tokenizer: Any, kind: str):
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got '{kind}'")
        self.tokenizer, self.kind = tokenizer, kind

    def prompts(self, number: int, context: int, batch: int) -> list[torch.Tensor]:
        """Return `batch` prompts of `context` tokens, int64 [context] each."""
        return [self._request(number * batch + row, context)[0] for row in range(batch)]

    def references(self, number: int, context: int, batch: int) -> list[torch.Tensor]:
        """Return what was written down to follow each of these prompts, int64 [n] each."""
        return [self._request(number * batch + row, context)[1] for row in range(batch)]

    def _request(self, number: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        make = {"code": self._code, "editing": self._editing}.get(self.kind, self._written)
        prompt, reference = make(number, context)
        if len(prompt) != context:
            raise ValueError(
                f"--context: the documents of '{self.kind}' hold {len(prompt)} tokens, fewer than "
                f"{context}"
            )
        return torch.tensor(prompt), torch.tensor(reference)

    def _written(self, number: int, context: int) -> tuple[list[int], list[int]]:
        """Ask about topics that stand at the document's beginning, middle or end."""
        items = _written_requests()[self.kind]
        item, place = items[number % len(items)], (number % len(items)) / max(1, len(items) - 1)
        asked = self._tokens("\n\n" + item["asked"])
        room = context - len(asked)
        own = self._tokens("".join(map(_topics().__getitem__, item["topics"])))[: max(0, room)]
        others = [name for name in _topics() if name not in item["topics"]]
        first = number * len(others) // len(items) % len(others)
        around = [token for name in others[first:] + others[:first] for token in self._topics[name]]
        before = round(place * (room - len(own)))
        return [
            *around[:before],
            *own,
            *around[before : room - len(own)],
            *asked,
        ], self._tokens(item["answer"])

    def _code(self, number: int, context: int) -> tuple[list[int], list[int]]:
        tokens = self._tokens(_module(number))
        return tokens[:context], tokens[context:]

    def _editing(self, number: int, context: int) -> tuple[list[int], list[int]]:
        """Ask for lines from the document's middle with a name changed, or without comments."""
        tokens = self._tokens(_module(number))
        document = self.tokenizer.decode(tokens[:context])
        start = document.find("\ndef ", len(document) // 2) + 1
        start = start or len(document) // 2
        passage = document[start : start + _PASSAGE]
        head = passage[: passage.find("\n")]
        asked, edited = EDITS[number % len(EDITS)](passage)
        asked = self._tokens(f"\n\nRewrite the file above from `{head}` on. {asked}\n\n```python\n")
        return tokens[: context - len(asked)] + asked, self._tokens(edited)

    def _tokens(self, text: str) -> list[int]:
        return [*_encoded(self.tokenizer, text)]

    @cached_property
    def _topics(self) -> dict[str, list[int]]:
        return {name: self._tokens(text + "\n\n") for name, text in _topics().items()}


@lru_cache(maxsize=1024)
def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def rename(passage: str) -> tuple[str, str]:
    """Return what to ask for and the result: the passage's most frequent name, changed."""
    names = Counter(re.findall(r"\b[a-z_]{4,}\b", passage))
    old = next(name for name, _ in names.most_common() if name not in _EVERYDAY)
    new = f"given_{old}"
    return f"Rename `{old}` to `{new}`.", re.sub(rf"\b{old}\b", new, passage)


def drop_comments(passage: str) -> tuple[str, str]:
    """Return what to ask for and the result: no comments and no blank lines."""
    lines = (re.sub(r"\s*#.*", "", line) for line in passage.splitlines())
    kept = "\n".join(line for line in lines if line.strip())
    return "Leave out comments and blank lines.", kept


def annotate(passage: str) -> tuple[str, str]:
    """Return what to ask for and the result: every function says that it returns something."""

    def typed(match: re.Match[str]) -> str:
        return f"{match[1]}({match[2].rstrip()}) -> Any:"

    edited = re.sub(r"(def \w+)\(([^()]*)\)(?: -> [^:]+)?:", typed, passage)
    edited = re.sub(
        r"^(\s*)return (?!self)(.+)$", r"\1result = \2\n\1return result", edited, flags=re.M
    )
    return "Annotate every function's result, and name it before it is returned.", edited


EDITS = (rename, drop_comments, annotate)


@lru_cache(maxsize=1)
def _written_requests() -> dict[str, list[dict[str, Any]]]:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return dict(sorted(topics.items()))


def _module(number: int) -> str:
    package, name = MODULES[number % len(MODULES)]
    spec = find_spec(package)
    folders: Sequence[str] = (spec and spec.submodule_search_locations) or []
    if not folders:
        raise ValueError(f"--suite grounded: needs {package}, which is not installed")
    return (Path(folders[0]) / name).read_text(encoding="utf-8")

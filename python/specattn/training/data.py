"""Training text: reads files and folders as a stream and packs them into rows of equal length.

Only a buffer of rows is held in memory. What cannot be used is named and counted, because a corpus
that shrinks unnoticed is found out too late.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

logger = logging.getLogger(__name__)

_JSONL = (".jsonl", ".ndjson")
_DOCUMENTS_PER_CALL = 64  # fast tokenizers work on the documents of a call in parallel
_SHUFFLED_ROWS = 1024


def find_files(paths: Iterable[Path]) -> list[Path]:
    """List the files that `paths` stand for: files themselves, and all that lies in folders.

    Files and folders whose names start with a dot are left out of folders.

    Parameters
    ----------
    paths : iterable of Path

    Returns
    -------
    list of Path

    Raises
    ------
    ValueError
        A path does not exist, or there is no file at all.
    """
    paths = list(paths)
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = (found for found in path.rglob("*") if found.is_file())
            files += sorted(found for found in inside if not _hidden(found.relative_to(path)))
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"{path} is neither a file nor a folder")
    if not files:
        raise ValueError(f"no file in {', '.join(map(str, paths)) or 'an empty list of paths'}")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


@dataclass
class Documents:
    """The texts of some files: a JSONL file has one in each line, any other file is one.

    Iterating yields the texts; `files` may be reordered in between.

    Parameters
    ----------
    files : list of Path
    text_field : str
        Key of the text in a line of JSONL.

    Attributes
    ----------
    skipped : dict of str to str
        Where something could not be used, and why. Every entry is logged when it is first met.
    """

    files: list[Path]
    text_field: str = "text"
    skipped: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            yield from self._lines(path) if path.suffix in _JSONL else self._whole(path)

    def beginnings(self, tokenizer: Any, count: int, length: int) -> list[torch.Tensor]:
        """Return so many tokens of the first texts that have as many, up to `count` of them."""
        ids = (tokenizer(text, verbose=False)["input_ids"] for text in self)
        long_enough = (torch.tensor(tokens[:length]) for tokens in ids if len(tokens) >= length)
        return list(islice(long_enough, count))

    def _whole(self, path: Path) -> Iterator[str]:
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self._skip(str(path), _reason(error))
            return
        if text.strip():
            yield text
        else:
            self._skip(str(path), "empty")

    def _lines(self, path: Path) -> Iterator[str]:
        number = 0
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if text := self._parse(line, f"{path}:{number}"):
                        yield text
        except OSError as error:
            self._skip(str(path), _reason(error))
            return
        if number == 0:
            self._skip(str(path), "empty")

    def _parse(self, line: bytes, where: str) -> str | None:
        text, why = None, "empty"
        try:
            record = json.loads(line.decode("utf-8"))
        except ValueError as error:  # broken JSON and broken UTF-8 alike
            why = _reason(error)
        else:
            text = record.get(self.text_field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                text, why = None, f"no string under {self.text_field!r}"
        if text is not None and text.strip():
            return text
        self._skip(where, why)
        return None

    def _skip(self, where: str, why: str) -> None:
        if where not in self.skipped:
            self.skipped[where] = why
            logger.warning("skipped %s: %s", where, why)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg})"
    return str(error)


class PackedRows(IterableDataset):
    """Documents, tokenized and laid end to end, as rows of `row_length` tokens with their labels.

    Documents are separated by the tokenizer's end-of-text token. Every epoch reads the files in
    another order and passes the rows through a buffer from which they are drawn at random; both
    follow from the seed, so that a resumed run sees what an unbroken one sees.

    Parameters
    ----------
    documents : Documents
    tokenizer : PreTrainedTokenizerBase
    row_length : int
        Tokens of a row; its labels are the same tokens one further on.
    seed : int, optional
        None leaves everything in the order of the files.
    endless : bool
        Start over without end, each time in another order.
    limit : int, optional
        At most so many rows per epoch.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Any,
        row_length: int,
        *,
        seed: int | None = None,
        endless: bool = False,
        limit: int | None = None,
    ):
        if row_length < 1:
            raise ValueError(f"row_length must be positive, got {row_length}")
        self.documents, self.tokenizer, self.row_length = documents, tokenizer, row_length
        self.seed, self.endless, self.limit = seed, endless, limit
        self.epoch = 0
        self._length: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; the trainer calls it."""
        self.epoch = epoch

    def count(self) -> int:
        """Read everything once, without keeping it, and return the number of rows of an epoch."""
        if self._length is None:
            self._length = sum(1 for _ in self._rows(self.documents.files))
        return self._length

    def __len__(self) -> int:
        if self.endless:
            raise TypeError("an endless stream of rows has no length")
        return self.count()

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                "rows are packed in one stream: dataloader_num_workers must be 0 or 1, "
                f"got {worker.num_workers}"
            )
        epoch = self.epoch
        while True:
            found = False
            for row in self._epoch(epoch):
                found = True
                yield {"input_ids": row[:-1], "labels": row[1:]}
            if not self.endless or not found:
                return
            epoch += 1

    def _epoch(self, epoch: int) -> Iterator[torch.Tensor]:
        files = self.documents.files
        if self.seed is None:
            return self._rows(files)
        rng = random.Random(f"{self.seed}:{epoch}")
        return _shuffled(self._rows(rng.sample(files, len(files))), rng)

    def _rows(self, files: Sequence[Path]) -> Iterator[torch.Tensor]:
        """Cut the tokens of all documents into rows; the last token of one starts the next."""
        rows = self._cut(Documents(list(files), self.documents.text_field, self.documents.skipped))
        return islice(rows, self.limit)

    def _cut(self, documents: Documents) -> Iterator[torch.Tensor]:
        eos = self.tokenizer.eos_token_id
        separator = [] if eos is None else [eos]
        pending: list[int] = list(separator)
        texts = iter(documents)
        while batch := list(islice(texts, _DOCUMENTS_PER_CALL)):
            for ids in self.tokenizer(batch, verbose=False)["input_ids"]:
                pending += ids + separator
                start = 0
                while start + self.row_length < len(pending):
                    yield torch.tensor(pending[start : start + self.row_length + 1])
                    start += self.row_length
                del pending[:start]


def _shuffled(rows: Iterator[torch.Tensor], rng: random.Random) -> Iterator[torch.Tensor]:
    """Pass rows on through a buffer, each time a random one."""
    buffer = list(islice(rows, _SHUFFLED_ROWS))
    for row in rows:
        place = rng.randrange(len(buffer))
        yield buffer[place]
        buffer[place] = row
    rng.shuffle(buffer)
    yield from buffer

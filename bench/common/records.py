"""Result files: JSON Lines, one record a line, of which the first describes the run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specattn.files import write_atomically

Record = dict[str, Any]


class RecordFile:
    """Records, and the file that each is appended to at once: an interrupt keeps what is there.

    The file is written anew with the records that it begins with; without a path they stay in
    memory alone.
    """

    def __init__(self, path: Path | None, records: Iterable[Record] = ()):
        self.path, self.records = path, list(records)
        if path is not None:
            text = "".join(map(_line, self.records))
            write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))

    def add(self, record: Record) -> None:
        """Append one line."""
        line = _line(record)
        self.records.append(json.loads(line))
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)

    @property
    def rows(self) -> list[Record]:
        """The rows, in the order in which they were measured."""
        return of_kind(self.records, "row")


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """Return the records of one kind."""
    return [record for record in records if record["kind"] == kind]


def label(record: Record) -> str:
    """Return a decoding row's method with its options."""
    return " ".join([record["method"], *(f"{k}={v}" for k, v in record["settings"].items())])


def row_key(record: Record) -> tuple:
    """Return what tells a decoding row of a file from all others of the same run."""
    names = ("section", "method", "context", "batch", "temperature")
    options = tuple(sorted((k, str(v)) for k, v in record["settings"].items()))
    shaping = tuple(sorted(record.get("shaping", {}).items()))
    return (*(record[name] for name in names), options, shaping)


def whole_lines(path: Path) -> list[Record]:
    """Return a file's records, without a line cut short; raises ValueError for what is no JSON."""
    records = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            records.append({"kind": None, **json.loads(line)})
        except (json.JSONDecodeError, TypeError):
            raise ValueError(f"line {number} of {path} is no JSON object") from None
    return records


def _line(record: Record) -> str:
    # Python would write inf as a word that is no JSON; a missing figure is null.
    finite = {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"

"""One runner for all studies: their arguments, the machine, cell by cell into a file, a table."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from common import arguments
from common.machine import describe, disturbed
from common.records import Record, RecordFile
from common.tables import aligned
from decoding import models
from decoding.cases import Entry
from decoding.texts import Files, held_out_files

from specattn.decoding import Method, Target
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.machine_load import Others
from specattn.planning.models import EMBEDDED_TARGET

OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"type": Path, "metavar": "FOLDER", "help": "a checkpoint"},
    "dtype": {"choices": models.DTYPES},
    "method": {"action": "append", "metavar": "NAME[:OPTION=VALUE,...]", "help": "repeatable"},
    "context": {"type": arguments.numbers, "metavar": "N[,N]", "help": "prompts, such as 4k,16k"},
    "temperature": {"type": arguments.temperatures, "metavar": "T[,T]", "help": "0 is greedy"},
    "texts": {"type": arguments.number, "metavar": "N", "help": "held-out texts"},
    "new_tokens": {"type": arguments.number, "metavar": "N", "help": "of every run"},
    "repeats": {"type": arguments.number, "metavar": "N", "help": "timed runs"},
    "threads": {"type": arguments.number, "metavar": "N"},
    "seed": {"type": int, "help": "which text is continued"},
    "json": {"type": Path, "metavar": "FILE", "help": "JSON Lines; records are added to it"},
}
"""What studies can be asked; each names those that it takes, with their defaults."""


class Study:
    """A question: its cells, what is measured in one, and the table of all.

    `cells` names the options whose product the cells are; with `resumes`, cells that the file has
    are not measured again. `header` has the columns of the table, of which `row` fills a line.
    `methods` are built with what `built_with` has for them.
    """

    defaults: ClassVar[dict[str, Any]]
    cells: ClassVar[tuple[str, ...]] = ("context", "text")
    kind: ClassVar[str] = "row"
    header: ClassVar[Sequence[tuple[str, str]]] = ()
    resumes: ClassVar[bool] = False
    built_with: ClassVar[dict[str, dict[str, Any]]] = {}
    target: ClassVar[type[Target]] = Target

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self._snapshots: dict[tuple[int, int], PromptSnapshot] = {}
        self.methods: dict[str, Method] = {
            text: Entry.parse(text).build(self.built_with)
            for text in getattr(options, "method", None) or ()
        }

    @classmethod
    def add_arguments(cls, parser: arguments.Parser) -> None:
        """Add what only this study can be asked."""

    def measure(self, place: Record) -> Iterable[Record]:
        """Yield what a cell's place shows."""
        raise NotImplementedError

    def row(self, record: Record) -> Sequence[str]:
        """Return a record as a line of the table; nothing where it is only one of many in it."""
        return ()

    def table(self, records: list[Record]) -> str:
        """Return all records of the file as text."""
        return aligned(self.header, list(map(self.row, records)))

    def describes(self) -> Record:
        """Return the machine, and what all cells have in common."""
        return describe(torch.device("cpu"))

    def close(self) -> None:
        """End what was started for the cells."""

    def status(self, records: list[Record]) -> int:
        """Return the command's exit status, from what it has measured."""
        return 0

    def places(self) -> list[Record]:
        """Return the cells."""
        given = vars(self.options)
        values = {"text": range(given.get("texts", 0)), **given, "method": list(self.methods)}
        product = itertools.product(*(values[name] for name in self.cells))
        return [dict(zip(self.cells, one, strict=True)) for one in product]

    @cached_property
    def loaded(self) -> tuple[Any, Files]:
        """The model, and held-out texts."""
        folder = getattr(self.options, "model", EMBEDDED_TARGET)
        dtype = models.DTYPES[getattr(self.options, "dtype", "float32")]
        model, tokenizer = models.checkpoint(folder, dtype, torch.device("cpu"))
        return model, Files(tokenizer, held_out_files())

    def snapshot(self, context: int, text: int) -> PromptSnapshot:
        """Return a text that has been read, behind which every method can decode."""
        if (context, text) not in self._snapshots:
            model, texts = self.loaded
            room = self.options.new_tokens + max(one.max_nodes for one in self.methods.values())
            prompts = texts.prompts(text, context, 1)
            self._snapshots = {
                (context, text): PromptSnapshot(
                    self.target(model, 1, context + room),
                    prompts,
                    readers=self.methods.values(),
                )
            }
        return self._snapshots[context, text]


def parser_of(study: type[Study]) -> arguments.Parser:
    """Return what reads a study's command line."""
    module = sys.modules[study.__module__]
    parser = arguments.Parser(description=(module.__doc__ or "").splitlines()[0])
    for name, value in {**study.defaults, "json": None}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=value, **OPTIONS[name])
    study.add_arguments(parser)
    return parser


def run(study: type[Study], argv: list[str] | None = None) -> int:
    """Measure the cells of a study, keep and print them; return the exit status."""
    parser = parser_of(study)
    options = parser.parse_args(argv)
    torch.set_num_threads(getattr(options, "threads", torch.get_num_threads()))
    path, known = options.json, []
    if path and path.exists():
        known = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with parser.refusing():
        asked = study(options)
        places = asked.places()
        if study.resumes:
            places = [p for p in places if not any(p.items() <= one.items() for one in known)]
    file = RecordFile(path if places else None, known)
    if places:
        plan = {name: value for name, value in vars(options).items() if name not in study.cells}
        plan = {name: plan[name] for name in study.defaults if isinstance(plan.get(name), int)}
        schema = f"specattn.{study.__name__.lower()}/1"
        file.add({"kind": "run", "schema": schema, **asked.describes(), **plan})
        run = file.records[-1]
        print(f"{run['machine']['name']} | commit {run['commit']}")
    others, before = Others(), len(file.records)
    try:
        for place in places:
            with parser.refusing():
                measured = list(asked.measure(place))
                shared = {"kind": study.kind, **place, "others": others.cores()}
                for found in measured:
                    file.add(shared | found)
                    if cells := asked.row(file.records[-1]):
                        print("  ".join(filter(None, cells)), flush=True)
    finally:
        asked.close()
    records = [one for one in file.records if one.get("kind") in (study.kind, None)]
    print(asked.table(records))
    if text := disturbed(records):
        print(text)
    return asked.status(file.records[before:])

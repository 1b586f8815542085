"""A run: the sections that are asked for, measured one by one into a file and printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.machine import describe, heading, serving
from common.records import Record, RecordFile, label, of_kind, row_key, whole_lines
from common.tables import Progress
from transformers import PreTrainedModel

from specattn.decoding import Vegas
from specattn.planning import AcceptanceProfile
from specattn.planning.models import ModelShape

from . import columns, passes, pictures
from .cases import Group
from .grounded import Grounded
from .measure import MeasurePlan, measure, written
from .peers.engines import ENGINES
from .peers.process import Peers
from .sections import Section
from .targets import MARK, REFERENCE_NOTE
from .texts import Texts

SCHEMA = "specattn.decoding/1"
# What must be equal for rows of two runs to stand in one file.
_SAME = ("schema", "machine", "backend", "model", "plan", "suite", "acceptance")


@dataclass
class Session:
    """What all rows of a run share."""

    model: PreTrainedModel
    name: str
    texts: Texts
    plan: MeasurePlan
    profile: AcceptanceProfile | None  # with one, acceptance is simulated
    defaults: dict[str, dict[str, Any]]  # by method, options unless a row says otherwise
    budget: float  # seconds for the passes of one context
    suite: str | None  # the paper whose sections are measured
    peers: Peers
    quantize: str | None = None  # what the model's weights were rounded to
    kv_dtype: str | None = None  # elements of the cache, unless the model's

    @property
    def stored(self) -> dict[str, str]:
        """What has fewer bits than the model's type."""
        named = {"quantize": self.quantize, "kv_dtype": self.kv_dtype}
        return {name: kind for name, kind in named.items() if kind}

    @property
    def note(self) -> str | None:
        """What stands at the head of every line of output."""
        return f"{MARK} {self.profile.name}" if self.profile else None

    @property
    def acceptance(self) -> str:
        """What every record says of its acceptance."""
        return self.note or "measured"

    def record(self) -> Record:
        """Return the line that describes the run."""
        config, device = self.model.config, self.model.device
        return {
            "kind": "run",
            "schema": SCHEMA,
            **describe(device),
            "backend": serving(device),
            "model": {
                "name": self.name,
                "model_type": config.model_type,
                "layers": config.num_hidden_layers,
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "weights": "random" if self.profile else "checkpoint",
                "shape": asdict(ModelShape.of(config.to_dict(), self.name)),
                **self.stored,
            },
            "plan": asdict(self.plan),
            "suite": self.suite,
            "acceptance": self.acceptance,
        }

    def heading(self, sections: Sequence[Section], run: Record) -> str:
        """Return what a reader must know of all that follows."""
        model, plan = run["model"], self.plan
        text = (
            f"{heading(run)}\n{model['name']}, {model['layers']} layers, {model['dtype']}, "
            f"{model['weights']} weights, "
            + "".join(f"{name} {kind}, " for name, kind in self.stored.items())
            + f"{plan.new_tokens} new tokens, {plan.texts} texts, {plan.repeats} repeats"
        )
        if any(self._beyond(g, s.plan(plan)) for s in sections for g in s.groups):
            text += (
                f"\nwarning: some contexts and their new tokens go beyond the "
                f"{self.model.config.max_position_embeddings} positions of {self.name}: times "
                "hold, acceptance is that of a model outside its range"
            )
        if self.profile is None:
            return text
        rates = ", ".join(f"{rate:g}" for rate in self.profile.rates)
        return (
            f"{text}\ncache filled with random numbers, no prefill; every round is real, but what "
            f"is accepted is drawn: {rates} by position, given all before it, the last one for all "
            f"deeper ({self.profile.source})"
        )

    def check_texts(self, sections: Sequence[Section]) -> None:
        """Raise ValueError where the texts are too short for what is to be measured."""
        for section in sections:
            texts = self._texts(section)
            for group in section.groups:
                texts.prompts(0, group.context, 1)
                for number in range(self.plan.texts if section.referenced else 0):
                    written(texts, number, group, section.plan(self.plan))

    def measure(self, sections: Sequence[Section], file: RecordFile) -> None:
        """Measure what the file does not have yet, and print each section when it is complete."""
        there = {row_key(row) for row in file.rows}
        todo = [
            (section, group)
            for section in sections
            for group in section.groups
            if not {row_key(one) for one in self._known(section, group)} <= there
        ]
        total = sum(_weight(section.plan(self.plan), group) for section, group in todo)
        progress = Progress(total, lambda name: columns.lines(name, self.note))
        for section in sections:
            plan = section.plan(self.plan)
            for group in (group for one, group in todo if one is section):
                each = _weight(plan, group) / plan.runs(group)
                rows = measure(
                    self.model,
                    self._texts(section),
                    group,
                    plan,
                    self.profile,
                    lambda name, each=each: progress.show(name, each),
                    self.defaults,
                    self.peers,
                    section.referenced,
                    self.kv_dtype,
                )
                for row, known in zip(rows, self._known(section, group), strict=True):
                    if not row.cut:
                        file.add(known | row.record())
                if any(row.cut for row in rows):
                    raise KeyboardInterrupt
            self._time_passes(section, file)
            if section.title:
                timed = of_kind(file.records, "pass")
                timed = [one for one in timed if one["section"] == section.name]
                said = self.note or (REFERENCE_NOTE if section.referenced else None)
                columns.say("\n" + section.text(section.rows(file.rows), timed), said)

    def draw(self, sections: Sequence[Section], file: RecordFile, folder: Path) -> None:
        """Draw each section's pictures, where matplotlib is installed."""
        drawn = []
        try:
            for section in sections:
                prefix = section.name.lower().replace(" ", "-") + "-" if section.name else ""
                rows = section.rows(file.rows)
                drawn += pictures.draw(rows, folder, self.note, section.pictures, prefix)
        except ImportError:
            columns.say("\nno pictures: matplotlib is not installed", self.note)
            return
        columns.say("\npictures: " + ", ".join(map(str, drawn)), self.note)

    def _time_passes(self, section: Section, file: RecordFile) -> None:
        """Time the passes of a round one by one, at every context of a section that asks for it."""
        contexts = sorted({group.context for group in section.groups}) if section.passes else []
        for context in contexts:
            known = {"section": section.name, "model": self.name, "context": context}
            known["acceptance"] = self.acceptance
            if any(known.items() <= one.items() for one in of_kind(file.records, "pass")):
                continue
            method = Vegas(gamma=section.passes)
            found = passes.measure(self.model, method, context, self.budget)
            for one in found:
                file.add({**one, **known})
            seconds = {one["name"]: one["time"]["median"] for one in found}
            columns.say(
                f"\n{passes.table(found)}\n"
                f"A round of Vegas with {method.gamma} drafted tokens costs "
                f"{passes.round_cost(seconds, method.gamma):.2f} plain steps.",
                self.note,
            )

    def _texts(self, section: Section) -> Texts | Grounded:
        """Return what a section's prompts are made from."""
        return Grounded(self.texts.tokenizer, section.workload) if section.workload else self.texts

    def _known(self, section: Section, group: Group) -> list[Record]:
        """Return what is known of a group's rows before they are measured."""
        plan = section.plan(self.plan)
        shared = {
            "section": section.name,
            "model": self.name,
            **self.stored,
            "new_tokens": plan.new_tokens,
            "acceptance": REFERENCE_NOTE if section.referenced else self.acceptance,
            "beyond_positions": self._beyond(group, plan),
        }
        return [group.record(entry) | shared for entry in group.entries]

    def _beyond(self, group: Group, plan: MeasurePlan) -> bool:
        """Whether a text leaves the positions that the model was made for."""
        positions = self.model.config.max_position_embeddings
        return self.profile is None and group.context + plan.new_tokens > positions


def begun(path: Path | None, run: Record, *, resume: bool) -> RecordFile:
    """Return a file that has this run, and with `resume` the rows that were there before it.

    Raises ValueError where the file exists and `resume` was not asked for, where it is no file of
    this kind, and where its rows were measured on something else.
    """
    if path is None:
        if resume:
            raise ValueError("--resume needs --json FILE")
        return RecordFile(None, [run])
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--json: folder {path.absolute().parent} does not exist")
    records: list[Record] = []
    if path.exists():
        if not resume:
            raise ValueError(f"--json: {path} exists; continue it with --resume")
        records = whole_lines(path)
        if not records or records[0].get("schema") != SCHEMA:
            raise ValueError(f"--resume: {path} is no file of run_decoding.py")
    run = json.loads(json.dumps(run))
    for earlier in of_kind(records, "run"):
        changed = [name for name in _SAME if earlier.get(name) != run[name]]
        if changed:
            raise ValueError(f"--resume: {path} was measured with another {', '.join(changed)}")
    return RecordFile(path, [*records, run])


def verdict(rows: Sequence[Record]) -> list[str]:
    """Return what went wrong, a line for each row."""
    failed = [f"{label(row)}: {row['fault']}" for row in rows if row["fault"]]
    wrong = [
        f"{label(row)}: greedy text is not plain decoding's, and no tie explains it"
        for row in rows
        if row["method"] not in ENGINES  # rounding of theirs is in none of the passes we compare
        and any(not one["near_tie"] for one in (row.get("identity") or {}).get("differences", ()))
    ]
    return failed + wrong


def _weight(plan: MeasurePlan, group: Group) -> float:
    """Return how long a group takes beside others: passes over the weights and over the cache."""
    return plan.runs(group) * plan.new_tokens * group.batch * (1 + group.context / 8192)

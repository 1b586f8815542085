"""The JSON Lines that `run_decoding.py` writes, and taking up where it stopped.

A line of ``kind: run`` says what the lines after it were measured on; a resumed file has several.

=========  =========================================================================================
kind run   ``schema`` ("specattn.decoding/1"), ``machine``, ``versions``, ``commit``, ``time``,
           ``backend``, ``model`` (``name``, ``model_type``, ``layers``, ``dtype``, ``weights``:
           "checkpoint" or "random"), ``plan`` (``new_tokens``, ``texts``, ``repeats``, ``seed``),
           ``suite``, ``acceptance``
kind row   ``section`` of the suite or null, ``model``, ``method``, ``settings`` (the method's
           options), ``context``, ``batch``, ``temperature``, ``shaping`` (options of sampling that
           are not the default), ``new_tokens``, ``acceptance``
           ("measured", or "SIMULATED ACCEPTANCE" and the profile), ``beyond_positions`` (whether
           the text leaves the positions that the model was made for), ``fault`` or null, and unless
           it has one: ``tokens_per_second`` (``median``, ``spread``, ``samples``),
           ``prefill_seconds`` (null where none took place), ``rounds``, ``tau`` (tokens per round,
           bonus token included), ``tau_without_bonus``, ``acceptance_rate``,
           ``per_position_acceptance`` (share of all rounds), ``conditional_acceptance`` (pos-acc:
           given that all before it were accepted), ``round_seconds`` (``total``, ``draft``,
           ``target``, ``accept``: medians over runs of seconds per batched round), ``speedup``
           (over ``plain`` and ``transformers``), ``peak_bytes``, ``identity`` (greedy and measured
           only: ``compared`` requests and ``differences``), ``distinct`` (Distinct-1 to Distinct-4
           of the new tokens), ``details`` (numbers that the method alone reports), ``lengths`` (up
           to some lengths of a long generation: ``new_tokens``, ``seconds`` per token,
           ``tau_without_bonus``, ``speedup``), ``others`` (cores that other programs used
           meanwhile)
kind pass  one kind of pass behind a full cache: ``name``, ``model``, ``context``, ``rows``,
           ``bytes``, ``time``, ``eager`` (each ``median``, ``spread``, ``samples``),
           ``bandwidth``, ``acceptance``
=========  =========================================================================================

The peer ``transformers`` has no rounds: what counts them is null there.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.clock import spread

from .cases import TRANSFORMERS, Group, key
from .identity import Difference
from .measure import Plan, Row

SCHEMA = "specattn.decoding/1"
MEASURED = "measured"
# What must be equal for rows of two runs to stand in one file.
_SAME = ("schema", "machine", "backend", "model", "plan", "suite", "acceptance")


def case_record(
    group: Group,
    entry: Any,
    plan: Plan,
    *,
    model: str,
    section: str | None,
    acceptance: str,
    beyond_positions: bool,
) -> dict[str, Any]:
    """Return what is known of a row before it is measured."""
    return {
        "kind": "row",
        "section": section,
        "model": model,
        "method": entry.name,
        "settings": entry.options,
        "context": group.context,
        "batch": group.batch,
        "temperature": group.temperature,
        "shaping": group.shaping.options,
        "new_tokens": plan.new_tokens,
        "acceptance": acceptance,
        "beyond_positions": beyond_positions,
    }


def row_record(row: Row, known: dict[str, Any]) -> dict[str, Any]:
    """Return a row for JSON; `known` is its `case_record`."""
    if row.fault is not None:
        return {**known, "fault": row.fault}
    pooled, rounds = row.pooled, row.round_seconds
    figures: dict[str, Any] = {
        "fault": None,
        "tokens_per_second": {
            "median": statistics.median(row.speeds),
            "spread": spread(row.speeds),
            "samples": len(row.speeds),
        },
        "prefill_seconds": None
        if row.entry.name == TRANSFORMERS or not row.prefill_seconds
        else statistics.median(row.prefill_seconds),
        "rounds": pooled and pooled.rounds,
        "tau": pooled and pooled.mean_acceptance_length,
        "tau_without_bonus": pooled and pooled.mean_acceptance_length - 1,
        "acceptance_rate": pooled and pooled.acceptance_rate,
        "per_position_acceptance": pooled and pooled.position_rates,
        "conditional_acceptance": pooled and pooled.conditional_rates,
        "round_seconds": rounds,
        "speedup": row.speedups,
        "peak_bytes": row.peak_bytes,
        "identity": None,
        "distinct": row.distinct,
        "details": row.details,
        "lengths": row.lengths,
        "others": row.others,
    }
    if row.compared:
        figures["identity"] = {
            "compared": row.compared,
            "differences": [_difference(one) for one in row.differences],
        }
    return {**known, **figures}


def _difference(one: Difference) -> dict[str, Any]:
    return {**asdict(one), "near_tie": one.near_tie}


class File:
    """A file of JSON Lines that can be continued.

    Parameters
    ----------
    path : Path or None
        None keeps the records in memory alone.
    resume : bool
        Keep the rows that the file has; a line that an interrupt cut short is dropped.

    Attributes
    ----------
    records : list of dict
        Everything that the file holds.

    Raises
    ------
    ValueError
        The file exists and `resume` was not asked for, or it is no file of this kind.
    """

    def __init__(self, path: Path | None, *, resume: bool):
        self.path, self.records = path, list[dict[str, Any]]()
        if path is None:
            if resume:
                raise ValueError("--resume needs --json FILE")
            return
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--json: folder {path.absolute().parent} does not exist")
        if path.exists() and not resume:
            raise ValueError(f"--json: {path} exists; continue it with --resume")
        if path.exists():
            self.records = list(_whole_lines(path))
            if not self.records or self.records[0].get("schema") != SCHEMA:
                raise ValueError(f"--resume: {path} is no file of run_decoding.py")

    def begin(self, run: dict[str, Any]) -> None:
        """Write the line that describes a run.

        Raises
        ------
        ValueError
            The rows that are there were measured on something else.
        """
        run = json.loads(_line(run))
        for earlier in self.records:
            if earlier["kind"] == "run":
                changed = [name for name in _SAME if earlier.get(name) != run[name]]
                if changed:
                    raise ValueError(
                        f"--resume: {self.path} was measured with another {', '.join(changed)}"
                    )
        if self.path is not None:
            partial = self.path.with_name(self.path.name + ".partial")
            partial.write_text("".join(map(_line, self.records)), encoding="utf-8")
            partial.replace(self.path)
        self.add(run)

    def add(self, record: dict[str, Any]) -> None:
        """Append one line at once."""
        self.records.append(json.loads(_line(record)))
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(record))

    def has(self, known: Iterable[dict[str, Any]]) -> bool:
        """Whether all these rows are there already."""
        there = {key(record) for record in self.rows}
        return all(key(record) in there for record in known)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows, in the order in which they were measured."""
        return of_kind(self.records, "row")


def of_kind(records: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind."""
    return [record for record in records if record["kind"] == kind]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _whole_lines(path: Path) -> Iterable[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            return
        try:
            yield {"kind": None, **json.loads(line)}
        except (json.JSONDecodeError, TypeError):
            raise ValueError(f"--resume: line {number} of {path} is no JSON object") from None

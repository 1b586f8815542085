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
from dataclasses import asdict
from pathlib import Path

from common.clock import Timing
from common.records import Record, RecordFile, of_kind, whole_lines

from .cases import TRANSFORMERS, Entry, Group
from .measure import DecodeRow, MeasurePlan

SCHEMA = "specattn.decoding/1"
MEASURED = "measured"
# What must be equal for rows of two runs to stand in one file.
_SAME = ("schema", "machine", "backend", "model", "plan", "suite", "acceptance")


def case_record(
    group: Group,
    entry: Entry,
    plan: MeasurePlan,
    *,
    model: str,
    section: str | None,
    acceptance: str,
    beyond_positions: bool,
) -> Record:
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


def row_record(row: DecodeRow, known: Record) -> Record:
    """Return a row for JSON; `known` is its `case_record`."""
    if row.fault is not None:
        return {**known, "fault": row.fault}
    pooled = row.pooled
    figures: Record = {
        "fault": None,
        "tokens_per_second": asdict(Timing.of(row.speeds)),
        "prefill_seconds": None
        if row.entry.name == TRANSFORMERS or not row.prefill_seconds
        else statistics.median(row.prefill_seconds),
        "rounds": pooled and pooled.rounds,
        "tau": pooled and pooled.mean_acceptance_length,
        "tau_without_bonus": pooled and pooled.mean_acceptance_length - 1,
        "acceptance_rate": pooled and pooled.acceptance_rate,
        "per_position_acceptance": pooled and pooled.position_rates,
        "conditional_acceptance": pooled and pooled.conditional_rates,
        "round_seconds": row.round_seconds,
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
            "differences": [{**asdict(one), "near_tie": one.near_tie} for one in row.differences],
        }
    return {**known, **figures}


def begun(path: Path | None, run: Record, *, resume: bool) -> RecordFile:
    """Return a file that has this run, and with `resume` the rows that were there before it.

    Raises
    ------
    ValueError
        The file exists and `resume` was not asked for, it is no file of this kind, or its rows
        were measured on something else.
    """
    if path is None and resume:
        raise ValueError("--resume needs --json FILE")
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"--json: folder {path.absolute().parent} does not exist")
    if path is not None and path.exists() and not resume:
        raise ValueError(f"--json: {path} exists; continue it with --resume")
    records: list[Record] = []
    if path is not None and path.exists():
        records = whole_lines(path)
        if not records or records[0].get("schema") != SCHEMA:
            raise ValueError(f"--resume: {path} is no file of run_decoding.py")
    run = json.loads(json.dumps(run))
    for earlier in of_kind(records, "run"):
        changed = [name for name in _SAME if earlier.get(name) != run[name]]
        if changed:
            raise ValueError(f"--resume: {path} was measured with another {', '.join(changed)}")
    return RecordFile(path, [*records, run])

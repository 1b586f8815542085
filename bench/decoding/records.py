"""The JSON Lines that `run_decoding.py` writes, and taking up where it stopped.

`docs/benchmarks.md` names every field.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path

from common.clock import Timing
from common.records import Record, RecordFile, of_kind, whole_lines

from .cases import TRANSFORMERS
from .measure import DecodeRow

SCHEMA = "specattn.decoding/1"
MEASURED = "measured"
# What must be equal for rows of two runs to stand in one file.
_SAME = ("schema", "machine", "backend", "model", "plan", "suite", "acceptance")


def row_record(row: DecodeRow, known: Record) -> Record:
    """Return a row for JSON: what was known before, and its figures."""
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

    Raises ValueError where the file exists and `resume` was not asked for, where it is no file of
    this kind, and where its rows were measured on something else.
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

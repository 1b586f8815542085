"""Tokens per pass on grounded requests, and what one drafter gains over another.

    python bench/run_decoding.py --suite grounded --json FILE
    python bench/studies/grounded.py FILE

The second command prints the means of the first one's rows. Kinds as in LongSpecBench (OWL, arXiv
2510.07535), whose data is not used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.records import Record, label, of_kind, whole_lines
from common.tables import aligned, size
from decoding.grounded import KINDS

BASE, OURS = "prompt_lookup", "suffix nodes=64"
UNGROUNDED = "free text"


def table(rows: Sequence[Record]) -> str:
    """Return mean tokens per pass by kind and method, and of the grounded kinds together."""
    methods = list(dict.fromkeys(map(label, rows)))
    found = {
        section: [_mean(rows, section, one) for one in methods]
        for section in dict.fromkeys(row["section"] for row in rows)
    }
    grounded = [values for section, values in found.items() if section in set(KINDS) - {UNGROUNDED}]
    if grounded:
        found["mean of the grounded kinds"] = list(map(mean, zip(*grounded, strict=True)))
    header = [("tokens per pass", "<"), *((one, ">") for one in methods)]
    return aligned(
        header, [(name, *map("{:.2f}".format, values)) for name, values in found.items()]
    )


def ratios(rows: Sequence[Record], ours: str = OURS, base: str = BASE) -> dict[str, float]:
    """Return ours over the base: the mean over contexts of each kind, and over grounded kinds."""
    kinds = [one for one in KINDS if any(row["section"] == one for row in rows)]
    found = {one: _mean(rows, one, ours) / _mean(rows, one, base) for one in kinds}
    grounded = [value for kind, value in found.items() if kind != UNGROUNDED]
    return found | ({"mean of the grounded kinds": mean(grounded)} if grounded else {})


def _mean(rows: Sequence[Record], section: str, method: str) -> float:
    return mean(r["tau"] for r in rows if r["section"] == section and label(r) == method)


def main(path: str) -> None:
    """Print a file's means, all contexts together and one by one."""
    rows = of_kind(whole_lines(Path(path)), "row")
    print(table(rows))
    for context in [None, *dict.fromkeys(row["context"] for row in rows)]:
        some = [row for row in rows if context in (None, row["context"])]
        said = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in ratios(some).items())
        print(f"{OURS} over {BASE}, {'all' if context is None else size(context)}: {said}")


if __name__ == "__main__":
    main(sys.argv[1])

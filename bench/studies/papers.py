"""Figures that the papers print, to be shown beside ours and marked as theirs.

They lie in ``papers.json`` by paper and table, with their unit. Only what is printed as a number is
there: values that a plot alone shows are not guessed. Model names are the papers' short forms.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decoding.simulation import Profile, constant_rate

_PUBLISHED = json.loads((Path(__file__).parent / "papers.json").read_text(encoding="utf-8"))
# Gamma; beam widths [4, 16, 16, 16, 16]; levels of a dynamic tree of 60 nodes.
_VEGAS_DEPTH, _LONGSPEC_DEPTH, _POSS_DEPTH = 7, 5, 6


def published(paper: str, table: str) -> dict[str, Any]:
    """Return a table's figures without its unit."""
    return {name: value for name, value in _PUBLISHED[paper][table].items() if name != "unit"}


def source(paper: str) -> str:
    """Return the paper, its version and its machine."""
    return _PUBLISHED[paper]["source"]


def tables(paper: str) -> list[str]:
    """Return the tables and figures of which something is there."""
    return [name for name in _PUBLISHED[paper] if name != "source"]


def _vegas(model: str) -> Profile:
    # Without the bonus token: with it, gamma 7 and 11 would ask for rates that rise with depth.
    accepted = published("vegas", "Table 1")["1st Draft + Bonus"][model][str(_VEGAS_DEPTH)]
    return Profile(
        f"vegas-{model.lower()}",
        (round(constant_rate(accepted, _VEGAS_DEPTH), 3),),
        f"the constant rate that accepts {accepted} of {_VEGAS_DEPTH} drafted tokens, Vegas "
        f"table 1, {model}",
    )


def _longspec(short: str, name: str) -> Profile:
    tau = published("longspec", "Table 1")[short]["LongSpec"]["LCC"][0]
    return Profile(
        f"longspec-{name}",
        (round(constant_rate(tau - 1, _LONGSPEC_DEPTH), 3),),
        f"the constant rate that gives a tau of {tau} at {_LONGSPEC_DEPTH} levels, LongSpec "
        f"table 1, {short} on LCC",
    )


def _poss(model: str) -> Profile:
    tau = published("poss", "Table 1, tau")[model]["PosS-2"][-1]
    return Profile(
        f"poss-{model.lower()}",
        (round(constant_rate(tau - 1, _POSS_DEPTH), 3),),
        f"the constant rate that gives a tau of {tau} at depth {_POSS_DEPTH}, PosS table 1, "
        f"{model}, mean of six data sets",
    )


PROFILES = {
    profile.name: profile
    for profile in (
        _vegas("Qwen3-8B"),
        _vegas("gpt-oss-20b"),
        _longspec("L-8B", "llama-3.1-8b"),
        _longspec("V-7B", "vicuna-7b"),
        _poss("Llama-3-8B"),
    )
}
"""Profiles by name. No paper prints rates by position, so each is constant and says where from."""

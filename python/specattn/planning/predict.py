"""Predicts every method at its best settings, and explains why the fastest is the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .acceptance import AcceptanceProfile
from .passes import Workload
from .rounds import CANDIDATES, Round, plain_round


@dataclass(frozen=True)
class Prediction:
    """One method with one workload.

    Attributes
    ----------
    method, settings : str
        Its name, and its options as they are shown.
    round : Round
        For all requests at once.
    tokens : float
        Mean tokens that each request gains in a round, bonus token included.
    speedup : float
        Over plain decoding on the same machine.
    """

    method: str
    settings: str
    round: Round
    tokens: float
    speedup: float

    @property
    def break_even(self) -> float:
        """Tokens per round from which on the method beats plain decoding."""
        return self.tokens / self.speedup


def predict(workload: Workload, profiles: Mapping[str, AcceptanceProfile]) -> list[Prediction]:
    """Return plain decoding and every method at its best settings, the fastest first.

    Parameters
    ----------
    workload : Workload
    profiles : mapping of str to AcceptanceProfile
        By method; a method without one is left out.

    Returns
    -------
    list of Prediction
    """
    plain = plain_round(workload)
    found = [Prediction("plain", "", plain, 1.0, 1.0)]
    for method, profile in profiles.items():
        rounds = CANDIDATES[method](workload, profile)
        settings, one, tokens = max(rounds, key=lambda item: item[2] / item[1].total)
        speedup = tokens * plain.total / one.total
        found.append(Prediction(method, settings, one, tokens, speedup))
    return sorted(found, key=lambda one: -one.speedup)


def reasons(workload: Workload, best: Prediction, plain: Prediction) -> list[str]:
    """Return in words why the best method is the fastest, and what would change that."""
    step, whole = plain.round.verify, plain.round.total
    exchanges = f", exchanges {_ms(step.exchange)}" if step.exchange else ""
    lines = [
        f"A plain step takes {_ms(step.total)}: weights {_ms(step.weights)}, attention "
        f"{_ms(step.attention)}{exchanges}, host {_ms(step.host)}; its bound is {step.bound}."
    ]
    if best.method == "plain":
        lines.append("No draft pays: every round costs more plain steps than it yields tokens.")
        return lines
    verify = best.round.verify.total / whole
    draft = best.round.draft / whole
    lines.append(
        f"A round of {best.method} costs {best.round.total / whole:.2f} plain steps "
        f"(drafting {draft:.2f}, verifying {verify:.2f}) and yields {best.tokens:.2f} tokens; "
        f"it pays from {best.break_even:.2f} on."
    )
    if best.method == "vegas":
        lines.append(
            "Its draft steps read the weights and that share of the cache: the larger the part of "
            "attention in a plain step, the more they save."
        )
    if best.method in ("longspec", "poss"):
        lines.append(
            "Its drafter is one block: cheap beside the weights and the cache of all layers, which "
            "verification reads once for the whole tree."
        )
    if best.method == "tokenswift":
        lines.append(
            "One draft pass reads the weights and a partial cache, whatever the length; the rate "
            "is that of long outputs, which repeat what they have said."
        )
    if best.round.verify.bound == "host":
        lines.append("The host is the bound: replaying graphs (--launch graph) would help most.")
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"

"""Rounds of each method, its settings searched, and the reason why the best is best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specattn.ops.hybrid_tree_attention import cost as hybrid_cost

from .acceptance import Profile
from .passes import PassTime, Setting, attention_sizes, pass_time, select_time

GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24)
RATIO = 0.07  # the share of the cache that the profile of Vegas was measured with
MIN_TOKENS = 256
TREE = (4, 16, 16, 16, 16)  # LongSpec's beam widths, for which its profile was measured
WINDOW = 512


@dataclass(frozen=True)
class Round:
    """Seconds of one round: everything before verification, that pass, and acceptance."""

    draft: float
    verify: PassTime
    accept: float

    @property
    def total(self) -> float:
        """Seconds from one committed token to the next ones."""
        return self.draft + self.verify.total + self.accept


@dataclass(frozen=True)
class Prediction:
    """One method with one setting.

    Attributes
    ----------
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


def predict(setting: Setting, profiles: Mapping[str, Profile]) -> list[Prediction]:
    """Return plain decoding and every method at its best settings, the fastest first.

    Parameters
    ----------
    setting : Setting
    profiles : mapping of str to Profile
        By method; a method without one is left out.

    Returns
    -------
    list of Prediction
    """
    plain = plain_round(setting)
    found = [Prediction("plain", "", plain, 1.0, 1.0)]
    for method, candidates in (("vegas", _vegas), ("longspec", _longspec)):
        if method in profiles:
            rounds = candidates(setting, profiles[method])
            settings, one, tokens = max(rounds, key=lambda item: item[2] / item[1].total)
            speedup = tokens * plain.total / one.total
            found.append(Prediction(method, settings, one, tokens, speedup))
    return sorted(found, key=lambda one: -one.speedup)


def plain_round(setting: Setting) -> Round:
    """Predict one step of plain decoding."""
    return Round(0.0, pass_time(setting, 1), _accept(setting))


def vegas_round(
    setting: Setting, gamma: int, ratio: float = RATIO, min_tokens: int = MIN_TOKENS
) -> Round:
    """Predict a round in which the target drafts `gamma` tokens on what it selected before."""
    selected = max(min_tokens, round(ratio * setting.context))
    draft = gamma * pass_time(setting, 1, selected=selected).total
    verify = pass_time(setting, gamma + 1, collect=True)
    return Round(draft + select_time(setting, selected), verify, _accept(setting))


def longspec_round(setting: Setting, widths: Sequence[int]) -> Round:
    """Predict a round in which one block drafts a beam of tokens, level by level."""
    levels = [1, *widths]
    draft = sum(_block_seconds(setting, rows) for rows in levels[:-1])
    return Round(draft, pass_time(setting, sum(levels)), _accept(setting))


def _vegas(setting: Setting, profile: Profile) -> Iterator[tuple[str, Round, float]]:
    for gamma in GAMMAS:
        settings = f"gamma {gamma}, {RATIO:.0%} of the cache"
        yield settings, vegas_round(setting, gamma), profile.tokens_per_round(gamma)


def _longspec(setting: Setting, profile: Profile) -> Iterator[tuple[str, Round, float]]:
    for depth in range(1, len(TREE) + 1):
        widths = TREE[:depth]
        settings = f"tree of widths {', '.join(map(str, widths))}"
        yield settings, longspec_round(setting, widths), profile.tokens_per_round(depth)


def _accept(setting: Setting) -> float:
    """Return the time of acceptance and commit: about as many operators as a layer has."""
    return setting.machine.layer_seconds if setting.eager else 0.0


def _block_seconds(setting: Setting, rows: int) -> float:
    """Predict one step of LongSpec's drafter: window, the target's last layer, MLP, the head."""
    model, machine, tokens = setting.model, setting.machine, setting.batch * rows
    cross = 2 * model.hidden * model.head_dim * model.q_heads
    elements = model.attention_weights + cross + model.mlp_weights + model.head_weights
    weights = machine.seconds("linear", tokens, setting.size * elements, 2 * tokens * elements)
    attention = 0.0
    for keys in (min(WINDOW, setting.context), setting.context):
        cost = hybrid_cost(attention_sizes(setting, rows, keys))
        packed = rows * model.q_heads // model.kv_heads
        attention += machine.seconds("hybrid_tree_attention", packed, cost.bytes, cost.operations)
    # The block has two attentions, and its children are chosen on the host's command.
    host = 2 * machine.layer_seconds if setting.eager else 0.0
    return PassTime(weights, attention, host, machine.overlaps).total


def reasons(setting: Setting, best: Prediction, plain: Prediction) -> list[str]:
    """Return in words why the best method is the best, and what would change that."""
    step, whole = plain.round.verify, plain.round.total
    lines = [
        f"A plain step takes {_ms(step.total)}: weights {_ms(step.weights)}, attention "
        f"{_ms(step.attention)}, host {_ms(step.host)}; its bound is {step.bound}."
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
            f"Its draft steps read the weights and {RATIO:.0%} of the cache: the larger the part "
            "of attention in a plain step, the more they save."
        )
    if best.method == "longspec":
        lines.append(
            "Its drafter is one block: cheap beside the weights and the cache of all layers, which "
            "verification reads once for the whole tree."
        )
    if best.round.verify.bound == "host":
        lines.append("The host is the bound: replaying graphs (--launch graph) would help most.")
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"

"""Where two answers part, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from specattn.conform.endpoint import Answer, Place

LARGEST_NOISE = 0.5  # logits: two engines that differ by more compute different models
FEW = 200  # places that tell little of what rounding can do
_COMPARED = 10.0  # logits below the chosen token: nobody's choice, and not what rounding is told by


class Verdict(StrEnum):
    """What is said of a prompt."""

    SAME = "same"
    NEAR_TIE = "near-tie"
    DIFFERENT = "different"
    NOTHING = "nothing compared"


BAD = (Verdict.DIFFERENT, Verdict.NOTHING)
"""Verdicts that keep an engine from being acquitted."""


@dataclass(frozen=True)
class Finding:
    """What was found for a prompt; gaps are of logits, each in one engine."""

    verdict: Verdict
    reason: str
    place: int | None = None  # the token, from 0, at which the texts part
    tokens: tuple[str | None, str | None] = (None, None)  # None: the text has ended, or is no list
    gaps: tuple[float | None, float | None] = (None, None)  # of each one's token over the other's
    drift: float = 0.0  # the farthest apart that the two had a logit before that place
    compared: int = 0  # places before that one where both have the logit of a common other token


def parting(first: Answer, second: Answer) -> int | None:
    """Return the token at which two texts part, None where they are the same.

    Without lists of tokens it is counted in characters.
    """
    if first.text == second.text:
        return None
    if first.places and second.places:
        named = ([one.token for one in answer.places] for answer in (first, second))
        pairs = list(zip_longest(*named))
    else:
        pairs = list(zip_longest(first.text, second.text))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))


def drift_of(first: Answer, second: Answer) -> tuple[float, int]:
    """Return how far apart two engines have a logit where their texts are the same.

    Logits are those of listed tokens over the chosen one's, up to 10 below it. Beside the largest
    distance stands the number of places where any were held against each other.
    """
    end = parting(first, second)
    pairs = zip(first.places[:end], second.places[:end], strict=False)
    compared = [gaps for pair in pairs if (gaps := _common_gaps(*pair))]
    apart = (abs(a - b) for gaps in compared for a, b in gaps if a < _COMPARED)
    return max(apart, default=0.0), len(compared)


def noise_of(pairs: Iterable[tuple[Answer, Answer]]) -> float:
    """Return what rounding does to logits between two engines: the largest drift of all prompts.

    What drifts farther than `LARGEST_NOISE` is not rounding, and not counted.
    """
    drifts = (drift_of(*pair)[0] for pair in pairs)
    return max((one for one in drifts if one <= LARGEST_NOISE), default=0.0)


def notes_of(
    noise: float, places: int, pairs: Iterable[tuple[Answer, Answer]], *, sampled: bool = False
) -> list[str]:
    """Return in words what so many compared places tell of rounding."""
    if not all(one.lists for pair in pairs for one in pair if one.text):
        return ["An engine gives no log-probabilities: what parts is not explained."]
    if not places:
        return [
            "No logit of one engine could be held against the other's: what parts is not explained."
        ]
    notes = [f"Where texts are the same, logits are up to {noise:.2g} apart ({places} tokens)."]
    if places < FEW and not sampled:
        notes.append(
            f"warning: {places} tokens tell little of what rounding can do; give more text"
        )
    return notes


def _common_gaps(first: Place, second: Place) -> list[tuple[float, float]]:
    """Return the two gaps of each other token that both list with finite numbers."""
    both = first.listed.keys() & second.listed.keys() - {first.token}
    gaps = ((first.gap(token), second.gap(token)) for token in both)
    return [(a, b) for a, b in gaps if a is not None and b is not None]


def judge(first: Answer, second: Answer, noise: float, *, sampled: bool = False) -> Finding:
    """Return what is said of a prompt that two engines continued.

    Parameters
    ----------
    first, second : Answer
        Of the engine that does not draft, and of the one that is held against it.
    noise : float
        What rounding does to logits between the two (`noise_of`).
    sampled : bool
        Whether a seed decided: then no gap explains another token.

    Notes
    -----
    Greedily each engine takes its own likeliest token. Where they part, the first one has its token
    ahead by one gap, the second one its own by another: together that is how far apart they have
    the same two logits. Twice the noise explains it, and nothing more does. A token that an engine
    wrote although it ranks the other one higher is explained by nothing.

    Texts without a token agree on nothing. Nor do those of engines that both list likely tokens,
    but nowhere a common one beside the written token, with finite numbers.
    """
    drift, compared = drift_of(first, second)
    place = parting(first, second)
    if drift > LARGEST_NOISE:
        said = f"where the text is the same, logits are up to {drift:.2g} apart"
        return Finding(
            Verdict.DIFFERENT,
            f"{said}: another model, or another prompt",
            place,
            drift=drift,
            compared=compared,
        )
    if place is None:
        verdict, reason = Verdict.SAME, "the same text"
        if not first.text:
            verdict, reason = Verdict.NOTHING, "both wrote nothing"
        elif not compared and first.lists and second.lists:
            verdict = Verdict.NOTHING
            reason = "the same text, but no logit could be held against another"
        return Finding(verdict, reason, drift=drift, compared=compared)
    known = place < len(first.places) and place < len(second.places)
    if not known:
        texts = (first.text, second.text)
        ended = bool(first.places and second.places) or any(len(x) <= place for x in texts)
        why = "one text has ended" if ended else "without log-probabilities nothing explains it"
        return Finding(Verdict.DIFFERENT, why, place, drift=drift, compared=compared)
    ours, theirs = first.places[place], second.places[place]
    tokens, gaps = (ours.token, theirs.token), (ours.gap(theirs.token), theirs.gap(ours.token))
    verdict, reason = Verdict.DIFFERENT, ""
    most = 2 * noise
    if sampled:
        reason = "drawn with the same seed"
    elif gaps[0] is None or gaps[1] is None:
        name = "first" if gaps[0] is None else "second"
        least = (ours if gaps[0] is None else theirs).least_gap
        reason = (
            f"the {name} engine has the other token at least {least:.2g} behind its own"
            if math.isfinite(least)
            else f"the {name} engine gives no finite log-probabilities: nothing explains it"
        )
    elif (least := min(gaps[0], gaps[1])) < -most:
        name = "first" if gaps[0] == least else "second"
        reason = f"the {name} engine ranks the other token {-least:.2g} higher than what it wrote"
    else:
        apart = max(gaps[0], 0.0) + max(gaps[1], 0.0)
        verdict = Verdict.NEAR_TIE if apart <= most else Verdict.DIFFERENT
        reason = f"logits {apart:.2g} apart, rounding explains up to {most:.2g}"
    return Finding(verdict, reason, place, tokens, gaps, drift, compared)

"""Parametrising by a covering set: quick cases that hold every pair of values, all others slow."""

from itertools import combinations, product

import pytest


def pairs(names, *values, ids=None):
    """Parametrise as `pytest.mark.parametrize` would one by one; two values in every way are quick.

    `names` are those of the parameters, "a, b". The whole product stays, for `make fuzz`.
    """
    cases = list(product(*(range(len(given)) for given in values)))
    held = {case: set(combinations(enumerate(case), 2)) for case in cases}
    left, quick = set().union(*held.values()), set()
    while left:
        best = max(cases, key=lambda case: len(held[case] & left))
        quick.add(best)
        left -= held[best]
    marks = {case: () if case in quick else pytest.mark.slow for case in cases}
    chosen = [
        pytest.param(
            *(given[at] for given, at in zip(values, case, strict=True)), marks=marks[case]
        )
        for case in cases
    ]
    return pytest.mark.parametrize(tuple(names.split(", ")), chosen, ids=ids)

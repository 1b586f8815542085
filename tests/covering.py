"""Parametrising by a covering set: few cases are quick, all others of the product slow."""

from functools import partial
from itertools import combinations, product

import pytest


def _covered(together, names, *values, ids=None):
    """Parametrise as `pytest.mark.parametrize` would one by one, for `make fuzz`.

    Quick are cases that hold so many values together in every way. `names` are those of the
    parameters, "a, b".
    """
    cases = list(product(*(range(len(given)) for given in values)))
    held = {case: set(combinations(enumerate(case), together)) for case in cases}
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


each, pairs = partial(_covered, 1), partial(_covered, 2)

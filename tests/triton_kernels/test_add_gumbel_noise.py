from hypothesis import given, settings

from tests import gumbel

from .conftest import DEVICE


@settings(max_examples=20)
@given(problem=gumbel.PROBLEMS)
def test_is_the_references_noise(problem):
    gumbel.check(**problem, device=DEVICE)

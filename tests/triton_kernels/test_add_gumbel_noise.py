from hypothesis import given

from tests import gumbel

from .conftest import DEVICE, interpreted


@interpreted(20)
@given(problem=gumbel.PROBLEMS)
def test_is_the_references_noise(problem):
    gumbel.check(**problem, device=DEVICE)

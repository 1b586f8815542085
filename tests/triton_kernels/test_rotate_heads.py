"""Heads between their product and attention: against torch's own operators in float64."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from specattn.triton_kernels import rotate_heads as kernels
from specattn.triton_kernels.rotate_heads import rotate_heads

import specattn
from tests.layer_steps import EIGHT_BITS, Heads, check_heads, make_heads, some_heads

from .conftest import DEVICE, interpreted, mostly


def rotated(call: Heads):
    """Return what becomes of a call on the device that is tested, and what is returned."""
    done = call.to(DEVICE)
    return done, rotate_heads(*done.arguments)


@interpreted(60)
@given(some_heads())
def test_against_float64(call):
    check_heads(call, *rotated(call))


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # NumPy's words for these
@pytest.mark.parametrize("stored", mostly(*EIGHT_BITS), ids=str)
def test_rows_that_are_no_numbers_have_scales_that_are_none(stored):
    call = make_heads(dtype=torch.bfloat16, half=4, stored=stored, normed=(False, False))
    call.heads[0, 1] *= 1e-9  # the least scale
    for channel, head in ((0, 4), (5, 5), (12, 6)):  # what turns, its other half, what stays
        call.heads[1, 2, head, channel] = torch.nan
    call.heads[1, 0, 7, 1] = torch.inf
    done, (_, k, v) = rotated(call)
    expected = call.to(DEVICE)
    (keys, values), _, (k_scale, v_scale) = expected.store
    slots = torch.tensor([[30, 31, 32], [40, 41, 42]], device=DEVICE)  # of 40 for each request
    scales = {"k_scale": k_scale, "v_scale": v_scale, "scale": "dynamic"}
    specattn.write_kv(k, v, keys, values, slots, **scales)
    assert k_scale[1, 2].isnan().all()
    assert v_scale[1, 2].isnan().tolist() == [True, False]
    assert torch.equal(done.memory, expected.memory)


def test_what_does_not_turn_stays_infinite():
    call = make_heads(half=4, normed=(False, False))
    call.heads[0, 0, 0, 12] = torch.inf
    _, (q, _, _) = rotated(call)
    assert q[0, 0, 0, 12] == torch.inf
    assert torch.equal(q.cpu().isfinite(), call.parts()[0].isfinite())


@pytest.mark.parametrize("normed", mostly((True, False), (False, True)))
def test_a_row_has_the_same_bits_among_any_others(normed):
    call = make_heads(3, 5, dtype=torch.bfloat16, normed=normed, depths="own")
    whole, _ = rotated(call)
    for b, t in ((0, 0), (1, 3), (2, 4)):
        place = call.place._replace(
            prefix=call.place.prefix[b : b + 1], depths=call.place.depths[b : b + 1, t : t + 1]
        )
        alone = Heads(call.heads[b : b + 1, t : t + 1].clone(), 4, call.norms, place, None)
        done, _ = rotated(alone)
        assert torch.equal(done.heads[0, 0], whole.heads[b, t])


def test_rows_that_mean_nothing_reach_beyond_no_table_and_no_cache():
    """Positions of 48 are known, and slots of 40; prefixes are what such rows come to have."""
    call = make_heads(3, 4, prefix=(38, -2, 47))
    done, _ = rotated(call)
    positions = torch.tensor([[38, 39, 40, 41], [0, 0, 0, 1], [47, 47, 47, 47]])
    depths = (positions - positions[:, :1]).int()
    place = call.place._replace(prefix=positions[:, 0].int(), depths=depths)
    exact = Heads(call.heads, 4, call.norms, place, None).stated(torch.float64)
    assert torch.allclose(done.heads[:, :, :6].cpu().double(), exact, atol=2e-6)
    memory = done.memory.cpu()
    written = ~memory.isnan().any(-1).any(-1)  # [2, B, N]
    assert written.nonzero().tolist() == [
        [half, b, n] for half in (0, 1) for b, slots in ((0, (38, 39)), (1, (0, 1))) for n in slots
    ]


def test_nothing_at_all():
    call = make_heads(rows=0)
    _, (q, k, v) = rotated(call)
    assert (q.shape, k.shape, v.shape) == ((2, 0, 4, 16), (2, 0, 2, 16), (2, 0, 2, 16))


def test_one_launch():
    with mock.patch.object(kernels, "launch", wraps=kernels.launch) as launches:
        rotated(make_heads())
    assert launches.call_count == 1

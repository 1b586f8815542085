"""Exchanges through shared memory against those of gloo, and a rank that is late."""

import os
import time

import pytest
import torch
import torch.distributed as dist

import specattn.distributed.shared_memory as shared_memory
from specattn.distributed import ContextParallel, RankLost, RanksDisagree
from tests.distributed.ranks import Ranks

PLACE = shared_memory._PLACE


def gathered(sizes):
    """Return whether exchanges of `sizes` bytes are what gloo makes of them."""
    ranks = ContextParallel()
    generator = torch.Generator().manual_seed(ranks.rank)
    assert ranks.shared_memory is not None
    for size in sizes:
        own = torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
        expected = [torch.empty_like(own) for _ in range(ranks.size)]
        dist.all_gather(expected, own)
        if ranks.rank == size % ranks.size:
            time.sleep(0.005)  # the others sleep
        if not ranks.gather("test", own)[0].equal(torch.stack(expected)):
            return False
    return True


def test_exchanges_of_any_size_are_those_of_gloo(two_ranks):
    sizes = (1, 4, 63, 64, 5000, PLACE - 16, PLACE, PLACE + 16, 3 * PLACE + 7, *range(16, 2000, 97))
    assert two_ranks(gathered, sizes) == [True, True]


@pytest.mark.slow
def test_exchanges_of_four_ranks_are_those_of_gloo(four_ranks):
    assert four_ranks(gathered, (1, 5000, PLACE + 16, *range(16, 20_000, 97))) == [True] * 4


def many(count):
    """Return how often a number was not what the other rank gives in that round."""
    ranks, wrong = ContextParallel(), 0
    for turn in range(count):
        (found,) = ranks.gather("test", torch.tensor([turn, ranks.rank]))
        wrong += found.tolist() != [[turn, rank] for rank in range(ranks.size)]
    return wrong


def test_many_exchanges_without_a_pause_stay_in_step(two_ranks):
    assert two_ranks(many, 2000) == [0, 0]


def reduced(dtype):
    ranks = ContextParallel()
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(ranks.rank)).mul(100).to(dtype)
    for name, op in (("sum", "SUM"), ("min", "MIN"), ("max", "MAX")):
        expected = x.clone()
        dist.all_reduce(expected, getattr(dist.ReduceOp, op))
        column = torch.stack([x, x], 2)[..., 0]  # not contiguous
        if not ranks.reduce("test", column, name).equal(expected):
            return name
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_reductions_of_two_ranks_are_those_of_gloo(two_ranks, dtype):
    assert two_ranks(reduced, dtype) == [None, None]


def disagree():
    ranks = ContextParallel()
    with pytest.raises(RanksDisagree) as raised:
        ranks.gather("test", torch.zeros(16 * (1 + ranks.rank)))
    return str(raised.value), ranks.gather("test", torch.tensor([ranks.rank]))[0].tolist()


def test_another_number_of_bytes_is_an_error_that_names_the_rank(two_ranks):
    first, second = two_ranks(disagree)
    assert first == ("rank 1 exchanges 128 bytes, rank 0 64", [[0], [1]])
    assert second == ("rank 0 exchanges 64 bytes, rank 1 128", [[0], [1]])


def refused(*given):
    raise OSError("no such file")


def without(missing):
    """Exchange where one rank cannot make the memory (0), or join it (1)."""
    ranks = ContextParallel()
    name, other = {0: ("_FOLDER", "/nowhere"), 1: ("SharedMemory", refused)}[missing]
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == missing:
            patch.setattr(shared_memory, name, other)
        return ranks.shared_memory is None, ranks.gather("test", torch.ones(1))[0].tolist()


@pytest.mark.parametrize("missing", [0, 1])
def test_ranks_that_share_no_memory_exchange_by_gloo(two_ranks, missing):
    assert two_ranks(without, missing) == [(True, [[1.0], [1.0]])] * 2


def left_behind():
    ContextParallel().gather("test", torch.ones(1))
    return [name for name in os.listdir(shared_memory._FOLDER) if name.startswith("specattn-")]


def test_no_file_is_left_behind(two_ranks):
    before = {name for name in os.listdir(shared_memory._FOLDER) if name.startswith("specattn-")}
    assert all(set(found) <= before for found in two_ranks(left_behind))


def late(seconds):
    ranks = ContextParallel()
    ranks.gather("test", torch.zeros(1))
    if ranks.rank == 1:
        time.sleep(seconds)
    begin = time.monotonic()
    with pytest.raises(RankLost) as raised:
        ranks.gather("test", torch.zeros(1))
    return str(raised.value), time.monotonic() - begin


def test_a_rank_that_does_not_come_in_time_is_lost():
    ranks = Ranks(2, timeout=3)
    ranks.start(late, 60)
    message, seconds = ranks.result(0)
    ranks.close()
    assert message == "rank 1 of 2 does not answer (rank 1 did not come within 3 s)"
    assert seconds > 3

"""What ranks exchange, how they disagree, and what is said of one that is lost."""

import os
import signal
import time

import pytest
import torch

from specattn.distributed import ContextParallel, RankLost, RanksDisagree
from specattn.distributed.group import Buffer
from tests.distributed.ranks import Ranks


def gathered():
    ranks = ContextParallel()
    own = torch.full((2, 3), ranks.rank + 0.5), torch.tensor([ranks.rank], dtype=torch.int8)
    first, second = ranks.gather("test", *own)
    assert ranks.sent_bytes == {"test": (ranks.size - 1) * (32 + 16)}
    return first[:, 0, 0].tolist(), tuple(first.shape), second.tolist()


def test_ranks_gather_tensors_of_any_dtype_in_one_buffer(two_ranks):
    assert two_ranks(gathered) == [([0.5, 1.5], (2, 2, 3), [[0], [1]])] * 2


def test_parts_of_a_buffer_do_not_overlap():
    parts = [((3,), torch.int8), ((2, 2), torch.float64), ((5,), torch.bfloat16)]
    buffer = Buffer(2, parts, torch.device("cpu"))
    for value, own in enumerate(buffer.own):
        own.fill_(value)
    assert [own.unique().tolist() for own in buffer.own] == [[0], [1], [2]]
    assert [tuple(part.shape) for part in buffer.all] == [(2, 3), (2, 2, 2), (2, 5)]


def agreed():
    ranks = ContextParallel()
    return ranks.agree(5, flag=ranks.rank == 0), ranks.agree(6, flag=ranks.rank == 1)


def test_what_the_first_rank_says_counts(two_ranks):
    assert two_ranks(agreed) == [(True, False)] * 2


def disagree(way):
    ranks = ContextParallel()
    versions = {"torch": "2.9", "specattn": f"0.{ranks.rank}"}
    call, given = {"tokens": (ranks.agree, ranks.rank), "facts": (ranks.agree_on, versions)}[way]
    with pytest.raises(RanksDisagree) as raised:
        call(given)
    return str(raised.value)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("tokens", "rank 1 goes on with other tokens than rank 0"),
        ("facts", "rank 1 has specattn 0.1, rank 0 has 0.0"),
    ],
)
def test_a_rank_that_disagrees_is_named(two_ranks, way, message):
    assert all(message in found for found in two_ranks(disagree, way))


def exchange_twice(ranks):
    for _ in range(2):
        ranks.gather("test", torch.zeros(1000))


def lose(name, shares):
    """Let rank 1 end or stop; return what the others say, and after how many seconds."""
    ranks = ContextParallel()
    if not shares:
        vars(ranks)["shared_memory"] = None
    ranks.gather("test", torch.zeros(1))
    if ranks.rank == 1:
        os.kill(os.getpid(), getattr(signal, name))
    begin = time.monotonic()
    with pytest.raises(RankLost) as raised:
        exchange_twice(ranks)  # one that was under way may still succeed
    return str(raised.value), time.monotonic() - begin


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (2, "SIGKILL"),
        pytest.param(4, "SIGKILL", marks=pytest.mark.slow),
        pytest.param(4, "SIGSTOP", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("shares", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_lost_rank_is_named_by_the_others_within_the_timeout(size, name, shares):
    timeout = 20
    ranks = Ranks(size, timeout)
    ranks.start(lose, name, shares)
    found = [ranks.result(rank) for rank in range(size) if rank != 1]
    ranks.close()
    for message, seconds in found:
        assert f"rank 1 of {size} does not answer" in message
        assert "\n" not in message
        assert seconds < 10 * timeout  # on a machine that others use, too


def test_without_ranks_there_is_nothing_to_share():
    with pytest.raises(ValueError, match="torchrun"):
        ContextParallel()

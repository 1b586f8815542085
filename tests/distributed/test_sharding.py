import pytest
import torch

from specattn.distributed.sharding import Sharding


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("block", [1, 4, 5])
def test_every_token_lies_once_and_in_the_order_of_the_text(ranks, block):
    length = 47
    held = [[] for _ in range(ranks)]
    for position in range(length):
        held[position // block % ranks].append(position)
    for rank, expected in enumerate(held):
        sharding = Sharding(rank, ranks, block)
        positions = torch.arange(length)
        mine = positions[sharding.is_mine(positions)]
        assert mine.tolist() == expected
        assert sharding.slots(mine).tolist() == list(range(len(expected)))
        assert sharding.positions(torch.arange(len(expected))).tolist() == expected
        counts = [sum(p < n for p in expected) for n in range(length + 1)]
        assert sharding.held(torch.arange(length + 1)).tolist() == counts
        assert len(expected) <= sharding.room(length) < len(expected) + 2 * block


@pytest.mark.parametrize(("block", "unit"), [(4, 1), (6, 3), (4, 4)])
def test_what_ranks_know_of_their_tokens_is_put_in_order(block, unit):
    ranks, length = 3, 50
    per_rank = []
    for rank in range(ranks):
        sharding = Sharding(rank, ranks, block)
        first_slots = torch.arange(0, sharding.room(length), unit)
        per_rank.append(sharding.positions(first_slots) // unit)
    known = Sharding(0, ranks, block).in_order(torch.stack(per_rank)[:, None], length // unit, unit)
    assert known.tolist() == [list(range(length // unit))]

"""The best tokens of all ranks are those that one rank would select, which has all scores."""

import torch

from specattn.distributed import ContextParallel
from specattn.distributed.selection import OwnShares, best_of_all
from specattn.distributed.sharding import Sharding

CASES = (
    {"budget": 7},
    {"budget": 500},
    {"ratio": 0.1},
    {"ratio": 0.3, "min_tokens": 11},
    {"ratio": 0.2, "keep_first": 3, "keep_last": 5},
)


def scores_and_lengths(seed):
    """Return scores of 6 texts of up to 150 tokens, some equal, some NaN, some -inf."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(6, 150, generator=generator)
    scores[1] = scores[1].round()  # many are equal
    scores[2, :100] -= 9  # the best lie with few ranks
    scores[3, ::3], scores[3, ::7] = -torch.inf, torch.nan
    scores[4] = 0.0
    return scores, torch.tensor([150, 149, 131, 77, 64, 3], dtype=torch.int32)


def expected(scores, length, budget=None, ratio=None, min_tokens=0, keep_first=0, keep_last=0):
    """Select by sorting a list: the later of two equal scores first, NaN as -inf."""
    n = int(length)
    wanted = budget if ratio is None else -int(-(ratio * n - 1e-6) // 1)
    wanted = min(n, max(wanted, min_tokens, keep_first + keep_last))
    kept = {p for p in range(n) if p < keep_first or p >= n - keep_last}
    values = [float("-inf") if s != s else s for s in scores[:n].tolist()]
    others = sorted((p for p in range(n) if p not in kept), key=lambda p: (-values[p], -p))
    return sorted([*kept, *others[: wanted - len(kept)]])


def select(block):
    ranks = ContextParallel(block_size=block)
    sharding, found = Sharding(ranks.rank, ranks.size, block), []
    for seed, share in enumerate(CASES):
        scores, lengths = scores_and_lengths(seed)
        slots = torch.arange(sharding.room(150))
        beyond = torch.nn.functional.pad(scores, (0, 200), value=torch.nan)
        own = beyond[:, sharding.positions(slots)].contiguous()
        indices, counts = best_of_all(ranks, sharding, 150, own, lengths, **share)
        found.append([i[:n].tolist() for i, n in zip(indices, counts.tolist(), strict=True)])
    return found


def test_two_ranks_select_what_one_would(two_ranks):
    wanted = [
        [expected(*text, **share) for text in zip(*scores_and_lengths(seed), strict=True)]
        for seed, share in enumerate(CASES)
    ]
    for block in (1, 8):
        assert two_ranks(select, block) == [wanted, wanted]


def test_a_rank_knows_its_share_of_a_selection():
    sharding = Sharding(rank=1, ranks=3, block=2)  # 2 3, 8 9, 14 15 are its tokens
    shares = OwnShares(sharding)
    indices = torch.tensor([[1, 2, 9, 10, 14, 3, -1], [8, 0, 1, 15, 2, 3, 9]], dtype=torch.int32)
    for lengths, wanted in (
        ([6, 7], [[0, 3, 4, 1], [2, 5, 0, 1, 3]]),
        ([0, 4], [[], [2, 5]]),
        ([2, 1], [[0], [2]]),
    ):
        slots, counts = shares.of(0, indices, torch.tensor(lengths, dtype=torch.int32))
        assert [s[:n].tolist() for s, n in zip(slots, counts.tolist(), strict=True)] == wanted
    indices[0, 0] = 15  # the same memory, another list
    slots, counts = shares.of(0, indices, torch.tensor([2, 0], dtype=torch.int32))
    assert (counts.tolist(), slots[0, :2].tolist()) == ([2, 0], [5, 0])

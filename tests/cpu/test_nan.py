"""A NaN shows in the rows that see it and in no other, wherever in a block of keys it lies."""

import pytest
import torch

import specattn

LENGTH, HK, D = 1100, 2, 128  # several splits where there are two threads
# The ends of blocks, vectors and pairs, and of the cache, which ends within a block.
PLACES = (0, 1, 63, 64, 447, 550, 1088, LENGTH - 1)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "group"), [(1, 1), (1, 4), (3, 1), (4, 4), (17, 1), (33, 4)])
def test_a_nan_shows_where_it_is_seen(rows, group, dtype):
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    q = normal(1, rows, HK * group, D)
    k_cache, v_cache = normal(1, LENGTH, HK, D), normal(1, LENGTH, HK, D)
    k, v = normal(1, rows, HK, D), normal(1, rows, HK, D)
    length = torch.tensor([LENGTH], dtype=torch.int32)

    def attend(**changed):
        tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k_tree": k, "v_tree": v}
        return specattn.hybrid_tree_attention(cache_seqlens=length, **{**tensors, **changed})

    assert all(x.isfinite().all() for x in attend())
    for number, place in enumerate(PLACES):
        head, channel = number % HK, (37 * number) % D
        seen = torch.zeros(1, rows, HK * group, dtype=torch.bool)
        seen[:, :, head * group : (head + 1) * group] = True
        keys, values = k_cache.clone(), v_cache.clone()
        keys[0, place, head, channel] = values[0, place, head, channel] = torch.nan
        out, lse = attend(k_cache=keys)
        assert torch.equal(lse.isnan(), seen), f"key {place}"
        assert torch.equal(out.isnan(), seen[..., None].expand_as(out)), f"key {place}"
        out, lse = attend(v_cache=values)
        hit = torch.zeros_like(out, dtype=torch.bool)
        hit[..., channel] = seen
        assert torch.equal(out.isnan(), hit), f"value {place}"
        assert lse.isfinite().all()
    for row in {0, rows // 2, rows - 1}:
        queries = q.clone()
        queries[0, row, row % (HK * group), row] = torch.nan
        own = torch.zeros(1, rows, HK * group, dtype=torch.bool)
        own[0, row, row % (HK * group)] = True
        out, lse = attend(q=queries)
        assert torch.equal(lse.isnan(), own), f"row {row}"
        assert torch.equal(out.isnan(), own[..., None].expand_as(out)), f"row {row}"
        drafted = k.clone()
        drafted[0, row, 0, 5] = torch.nan  # of a chain: seen from its own row on
        _, lse = attend(k_tree=drafted)
        assert torch.equal(
            lse.isnan()[0, :, :group], (torch.arange(rows) >= row)[:, None].expand(-1, group)
        )
        assert lse[..., group:].isfinite().all()

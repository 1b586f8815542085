"""Random writes into caches of every layout, and what plain indexing leaves there."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from tests.cases import restride
from tests.engine_layouts import LAYOUTS, memory, views

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(repr=False)
class Write:
    """Arguments of `write_kv`; the caches are views of `room`, in one of `LAYOUTS`."""

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    room: torch.Tensor
    layout: str
    shape: tuple[int, ...]

    def caches(self):
        """Return k_cache and v_cache, each [pages, page_size, Hk, D]."""
        return views(self.layout, self.room, self.shape)

    def arguments(self):
        """Return the arguments by name."""
        caches = dict(zip(("k_cache", "v_cache"), self.caches(), strict=True))
        return {"k": self.k, "v": self.v, **caches, "slots": self.slots}

    def to(self, device):
        """Return a copy on a device, with a room of its own."""
        tensors = {n: getattr(self, n).to(device) for n in ("k", "v", "slots")}
        return replace(self, room=self.room.clone().to(device), **tensors)

    def expected(self):
        """Return what `room` holds afterwards, token by token."""
        after = replace(self, room=self.room.clone())
        heads = self.k.shape[-2:]
        for new, cache in zip((self.k, self.v), after.caches(), strict=True):
            rows = new.reshape(-1, *heads)
            for row, slot in zip(rows, self.slots.flatten().tolist(), strict=True):
                if slot >= 0:
                    cache[divmod(slot, cache.shape[1])] = row.to(cache.dtype)
        return after.room


def make_write(
    tokens=(5,), pages=4, page_size=3, heads=2, head_dim=8, *, layout="SPNHC", strided=False,
    dtype=torch.float32, cache_dtype=None, slots_dtype=torch.int64, skipped=0.3, scale=1.0, seed=0,
):  # fmt: skip
    """Return a write of `tokens` (or of [B, T]) to different slots, of which some are negative."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator) * scale

    shape = (pages, page_size, heads, head_dim)
    k, v = (normal(*tokens, heads, head_dim).to(dtype) for _ in range(2))
    if strided:
        k, v = restride(k), restride(v)
    slots = torch.randperm(pages * page_size, generator=generator)[: k[..., 0, 0].numel()]
    dropped = torch.rand(slots.shape, generator=generator) < skipped
    slots = torch.where(dropped, -1 - slots, slots).view(tokens).to(slots_dtype)
    room = memory(layout, shape, cache_dtype or dtype)
    room = normal(*room.shape).to(room.dtype)
    return Write(k, v, slots, room, layout, shape)


@st.composite
def writes(draw, dtypes=DTYPES):
    """Return a random write."""
    tokens = draw(st.sampled_from([(1,), (7,), (33,), (1, 4), (3, 5)]))
    page_size, count = draw(st.sampled_from([1, 3, 16, 64])), torch.Size(tokens).numel()
    return make_write(
        tokens,
        -(-count // page_size) + draw(st.integers(0, 2)),
        page_size,
        heads=draw(st.sampled_from([1, 2, 5])),
        head_dim=draw(st.sampled_from([1, 8, 20, 64, 128])),
        layout=draw(st.sampled_from(LAYOUTS)),
        strided=draw(st.booleans()),
        dtype=draw(st.sampled_from(dtypes)),
        cache_dtype=draw(st.sampled_from(dtypes)),
        slots_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        skipped=draw(st.sampled_from([0.0, 0.3, 1.0])),
        scale=draw(st.sampled_from([1.0, 1e-6, 3e4])),
        seed=draw(st.integers(0, 2**16)),
    )


def assert_same(actual, expected):
    """Every element is the same, NaN included."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)

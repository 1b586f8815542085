"""What a layer does between its products, and the error that any implementation may have."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from specattn.reference._eight_bits import EIGHT_BITS, dynamic_scale, quantised

from specattn.blocks import TORCH, Norm, Place, Store
from tests.cases import assert_accurate

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LUCK = 1e-6  # what torch may hit in a few numbers of size one


@dataclass(repr=False)
class Heads:
    """A call of `rotate_heads`; what must not be read or written is NaN."""

    heads: torch.Tensor  # [B, T, Hq + 2 Hk, D]
    q_heads: int
    norms: tuple
    place: Place
    memory: torch.Tensor | None  # [2, B, N, Hk, D], in 8 bits with scales at the rows' ends
    stored: torch.dtype | None = None
    slot: int | None = None

    def __repr__(self):
        given = self.heads.shape, self.heads.dtype, self.q_heads, self.place.depths, self.slot
        return f"Heads{given}"

    def to(self, device):
        """Return a copy on a device, strides and all."""

        def moved(x):
            if x is None:
                return None
            room = x._base if x._base is not None else x
            return room.clone().to(device).as_strided(x.shape, x.stride(), x.storage_offset())

        norms = tuple(n and Norm(moved(n.weight), n.eps) for n in self.norms)
        place = Place(*(moved(x) for x in self.place))
        return replace(
            self, heads=moved(self.heads), memory=moved(self.memory), norms=norms, place=place
        )

    @property
    def store(self):
        """Where keys and values go, or None."""
        if self.memory is None:
            return None
        if self.stored is None:
            return Store(tuple(self.memory), self.slot)
        rows = self.memory.view(self.stored)[..., : self.heads.shape[3]]
        scales = self.memory.view(torch.float32)[..., -1]
        return Store(tuple(rows), self.slot, tuple(scales))

    @property
    def arguments(self):
        """What the kernel takes, in its order."""
        return self.heads, self.q_heads, self.norms, self.place, self.store

    def parts(self, heads=None):
        """Return queries, keys and values."""
        heads = self.heads if heads is None else heads
        kv_heads = (heads.shape[2] - self.q_heads) // 2
        return heads.split([self.q_heads, kv_heads, kv_heads], 2)

    def stated(self, dtype):
        """Return queries and keys [B, T, Hq + Hk, D] as torch computes them in a dtype."""
        place = self.place
        if place.depths is None:
            depths = torch.arange(self.heads.shape[1], dtype=torch.int32)[None]
            place = place._replace(depths=depths)
        norms = tuple(n and Norm(n.weight.to(dtype), n.eps) for n in self.norms)
        q, k, _ = TORCH.rotate(self.heads.to(dtype), self.q_heads, place, norms=norms)
        return torch.cat([q, k], 2)


def make_heads(
    batch=2, rows=3, heads=(4, 2), head_dim=16, half=8, dtype=torch.float32, *,
    normed=(True, True), depths=None, strided=False, stores=True, stored=None, slot=None, seed=0,
    prefix=(30, 0, 17),
):  # fmt: skip
    """Return random heads; ``depths`` are None, "own" of each request or "shared"."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    q_heads, kv_heads = heads
    x = normal(batch, rows, q_heads + 2 * kv_heads, head_dim).to(dtype)
    if strided:  # rows as parts of longer ones
        room = x.new_full((batch, rows + 1, x.shape[2] * head_dim + 24), torch.nan)
        inner = room[:, :rows, 8 : 8 + x.shape[2] * head_dim].unflatten(-1, x.shape[2:])
        x = inner.copy_(x)
    angles = torch.outer(torch.arange(48.0), 10 ** -torch.linspace(0, 3, half))
    given = None
    if depths:
        shape = (batch if depths == "own" else 1, rows)
        given = torch.randint(9, shape, generator=generator, dtype=torch.int32)
    prefix = torch.tensor(prefix[:batch], dtype=torch.int32)
    norms = [Norm(1 + normal(head_dim).to(dtype) / 4, 1e-5) if n else None for n in normed]
    return Heads(
        x, q_heads, tuple(norms), Place(angles.cos(), angles.sin(), prefix, given),
        _memory(batch, kv_heads, head_dim, dtype, stored) if stores else None, stored, slot,
    )  # fmt: skip


def _memory(batch, kv_heads, head_dim, dtype, stored, capacity=40):
    """Return room for keys and values: NaN, heads further apart than tokens, or rows of 8 bits."""
    if stored is None:
        room = torch.full((2, batch, kv_heads, capacity, head_dim), torch.nan, dtype=dtype)
        return room.transpose(2, 3)
    row = -(-(head_dim + 4) // 16) * 16
    return torch.full((2, batch, capacity, kv_heads, row), 255, dtype=torch.uint8)


@st.composite
def some_heads(draw):
    """Return random heads, some of which are stored."""
    stored = draw(st.sampled_from([None, None, *EIGHT_BITS]))
    head_dim = draw(st.sampled_from([8, 16, 24, 40, 64, 80, 96, 128]))
    return make_heads(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 6)),
        draw(st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 1), (0, 5), (9, 2), (3, 0)])),
        head_dim,
        min(draw(st.integers(0, 64)), head_dim // 2),
        draw(st.sampled_from(DTYPES)),
        normed=draw(st.tuples(st.booleans(), st.booleans())),
        depths=draw(st.sampled_from([None, "own", "shared"])),
        strided=draw(st.booleans()),
        stores=draw(st.booleans()),
        stored=stored,
        slot=draw(st.sampled_from([None, None, 0, 31])),
        seed=draw(st.integers(0, 2**16)),
    )


def check_heads(call, done, returned):
    """Hold ``done``, what became of a call, and what was returned against float64 and torch."""
    whole = sum(x.shape[2] for x in returned)
    assert torch.equal(torch.cat(returned, 2).cpu(), done.heads.cpu())
    assert whole == call.heads.shape[2]
    found, values = done.heads.cpu().split([whole - returned[2].shape[2], returned[2].shape[2]], 2)
    exact, rough = call.stated(torch.float64), call.stated(call.heads.dtype)
    luck = max(LUCK, torch.finfo(call.heads.dtype).eps / 2 * exact.abs().amax().item())
    assert_accurate(found, exact, rough, atol=luck)
    assert torch.equal(values, call.parts()[2])
    if call.memory is None:
        return
    expected = call.to("cpu")
    keys = found[:, :, call.q_heads :]
    for half, new in enumerate((keys, values)):
        cache, scales = expected.store.memory[half], expected.store.scales[half]
        for b, prefix in enumerate(call.place.prefix.tolist()):
            first = prefix if call.slot is None else call.slot
            slots = slice(first, first + new.shape[1])
            rows = new[b, : max(0, cache.shape[1] - first)]
            if call.stored is None:
                cache[b, slots] = rows
                continue
            scale = dynamic_scale(rows, call.stored)
            scales[b, slots] = scale
            cache[b, slots] = quantised(rows, scale, call.stored)
    found, wanted = done.memory.cpu(), expected.memory
    if call.stored is None:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    else:
        assert torch.equal(found, wanted)


def rows_of(shape, dtype, seed=0, *, strided=False, count=2):
    """Return random rows [.., H] and a weight [H]; strided ones lie among NaN, their parts too."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        x = torch.randn(*shape, generator=generator).to(dtype)
        if strided:
            room = x.new_full((*shape[:-2], shape[-2] + 1, shape[-1] + 24), torch.nan)
            x = room[..., : shape[-2], 8 : 8 + shape[-1]].copy_(x)
        found.append(x)
    return *found, 1 + torch.randn(shape[-1], generator=generator).to(dtype) / 4


def check_rows(found, function, *given):
    """Hold a result against ``function`` of the tensors in float64, and as torch computes it."""
    exact = function(*(x if x is None else x.double() for x in given))
    luck = max(LUCK, torch.finfo(found.dtype).eps / 2 * exact.abs().amax().item())
    assert_accurate(found, exact, function(*given), atol=luck)

"""Random problems, an independent oracle and the error bound that all tests of primitives share.

The oracle (`dense_attention`) is what PyTorch users write by hand: one dense mask over all keys,
repeated KV heads, one softmax. It shares no code with `specattn`.
"""

from dataclasses import dataclass, fields, replace

import torch
from hypothesis import note
from hypothesis import strategies as st

# Children of each node, breadth first; nodes left out at the end are leaves.
# EAGLE's and Medusa's published choices, both named `mc_sim_7b_63`: 26 and 64 nodes with the root.
EAGLE_CHILDREN = [4, 3, 2, 2, 1, 3, 2, 2, 1, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 2]
MEDUSA_CHILDREN = (
    [10, 10, 7, 3, 2, 1, 1, 1, 1, 1, 1]
    + [10, 3, 2, 1, 1, 1, 1, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1]
    + [0] * 10
    + [2]
)

NO_PAGE = 2**30  # whoever reads it as a page fails


def parents_from_children(children):
    """Return the parent list (root -1) of a tree given as child counts in breadth-first order."""
    parents = [-1]
    for node, count in enumerate(children):
        parents += [node] * count
    return parents


EAGLE_PARENTS = parents_from_children(EAGLE_CHILDREN)
MEDUSA_PARENTS = parents_from_children(MEDUSA_CHILDREN)


def random_parents(size, generator=None):
    """Return a random tree of `size` nodes; every parent comes before its children."""
    draw = [int(torch.randint(0, node, (), generator=generator)) for node in range(1, size)]
    return [-1, *draw]


def tree_mask_of(parents):
    """Return the bool [S, S] mask in which a node sees itself and its ancestors."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def restride(x):
    """Return `x` with heads outermost and padded rows: only the last dimension stays contiguous."""
    order = [x.dim() - 2, *range(x.dim() - 2), x.dim() - 1]
    moved = x.permute(order)
    rows, width = moved.shape[-2:]
    filler = float("nan") if x.is_floating_point() else 0
    room = x.new_full((*moved.shape[:-2], rows + 1, width + 8), filler)
    room[..., :rows, :width] = moved
    inverse = sorted(range(x.dim()), key=order.__getitem__)
    return room[..., :rows, :width].permute(inverse)


@dataclass(repr=False)
class Problem:
    """One ragged batch. Both caches hold the same tokens; the rest of them is NaN."""

    q: torch.Tensor  # [B, T, Hq, D]
    k_cache: torch.Tensor  # [B, N, Hk, D]
    v_cache: torch.Tensor  # [B, N, Hk, D]
    k_pages: torch.Tensor  # [pages, page_size, Hk, D]
    v_pages: torch.Tensor  # [pages, page_size, Hk, D]
    block_table: torch.Tensor  # int32 [B, max_pages], NO_PAGE where none is held
    cache_seqlens: torch.Tensor  # int32 [B]
    k_tree: torch.Tensor  # [B, S, Hk, D]
    v_tree: torch.Tensor  # [B, S, Hk, D]
    tree_mask: torch.Tensor  # bool [B, T, S]: the last T of S tree nodes
    key_depths: torch.Tensor  # int64 [B, S]: depth of every tree node

    @property
    def row_depths(self):
        """Depth of every query row, [B, T]."""
        return self.key_depths[:, self.key_depths.shape[1] - self.q.shape[1] :]

    def cache(self, paged=False):
        """Return the keyword arguments that name one of the two caches."""
        if paged:
            return {
                "k_cache": self.k_pages,
                "v_cache": self.v_pages,
                "block_table": self.block_table,
            }
        return {"k_cache": self.k_cache, "v_cache": self.v_cache}

    def _map(self, change):
        return replace(self, **{f.name: change(getattr(self, f.name)) for f in fields(self)})

    def to(self, dtype=None, device=None):
        """Return the same numbers in another floating dtype, or on another device."""
        return self._map(lambda x: x.to(device, dtype if x.is_floating_point() else None))

    def request(self, index):
        """Return the problem of one request alone; pages stay shared."""
        shared = ("k_pages", "v_pages")
        return replace(
            self,
            **{
                f.name: getattr(self, f.name)[index : index + 1]
                for f in fields(self)
                if f.name not in shared
            },
        )


def make_problem(
    lengths=(5, 12),
    rows=4,
    *,
    tree_size=None,
    parents=None,
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    page_size=4,
    spare=3,
    dtype=torch.float32,
    tree_in_cache=False,
    strided=False,
    scale=1.0,
    device="cpu",
    seed=0,
):
    """Build a `Problem` with the given cached lengths.

    `parents` gives every request that tree, "chain" a causal chain; by default trees are random.
    `tree_size` is the number of tree keys (`rows` unless given). `spare` is room beyond the longest
    request. `tree_in_cache` also stores the tree's keys behind each prefix. `strided` gives all
    floating tensors strides that are dense in the last dimension only.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, size = len(lengths), tree_size or rows
    if parents == "chain":
        parents = list(range(-1, size - 1))
    trees = [parents or random_parents(size, generator) for _ in lengths]
    masks = torch.stack([tree_mask_of(tree) for tree in trees])
    stored = [n + size * tree_in_cache for n in lengths]
    pages_per_request = -(-(max(stored) + spare) // page_size)
    capacity = pages_per_request * page_size

    def normal(*shape):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    q = normal(batch, rows, q_heads, head_dim)
    k_tree, v_tree = (normal(batch, size, kv_heads, head_dim) for _ in "kv")
    k_cache, v_cache = (normal(batch, capacity, kv_heads, head_dim) for _ in "kv")
    pages = batch * pages_per_request + 2
    k_pages, v_pages = (torch.full((pages, page_size, kv_heads, head_dim), torch.nan) for _ in "kv")
    k_pages, v_pages = k_pages.to(dtype), v_pages.to(dtype)
    block_table = torch.full((batch, pages_per_request), NO_PAGE, dtype=torch.int32)
    free = torch.randperm(pages, generator=generator).tolist()
    for b, length in enumerate(lengths):
        if tree_in_cache:
            k_cache[b, length : length + size] = k_tree[b]
            v_cache[b, length : length + size] = v_tree[b]
        k_cache[b, stored[b] :] = torch.nan
        v_cache[b, stored[b] :] = torch.nan
        for column in range(-(-stored[b] // page_size)):
            page = block_table[b, column] = free.pop()
            tokens = slice(column * page_size, (column + 1) * page_size)
            k_pages[page] = k_cache[b, tokens]
            v_pages[page] = v_cache[b, tokens]
    problem = Problem(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k_pages=k_pages,
        v_pages=v_pages,
        block_table=block_table,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        k_tree=k_tree,
        v_tree=v_tree,
        tree_mask=masks[:, size - rows :],
        key_depths=masks.sum(-1) - 1,
    )
    if strided:
        problem = problem._map(lambda x: restride(x) if x.is_floating_point() else x)
    return problem.to(device=device)


@st.composite
def problems(draw, max_length=40, head_dims=(8, 64), dtypes=(torch.float64,), **fixed):
    """Draw a `Problem`: ragged lengths (zero included), trees, GQA, page sizes and strides."""
    rows = draw(st.integers(1, 6))
    kv_heads = draw(st.sampled_from([1, 2]))
    options = {
        "lengths": tuple(draw(st.lists(st.integers(0, max_length), min_size=1, max_size=3))),
        "rows": rows,
        "parents": draw(st.sampled_from([None, "chain"])),
        "q_heads": kv_heads * draw(st.sampled_from([1, 3, 4])),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from(head_dims)),
        "page_size": draw(st.sampled_from([1, 4, 16])),
        "dtype": draw(st.sampled_from(dtypes)),
        "strided": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }
    options |= fixed
    note(f"make_problem(**{options})")
    return make_problem(**options)


def dense_attention(q, k, v, visible, *, softmax_scale=None, softcap=0.0, sinks=None):
    """Return `(out, lse)` as eager PyTorch computes them in q's own dtype.

    q [B, T, Hq, D], k and v [B, M, Hk, D], visible bool [B, T, M]; M may be zero.
    """
    group = q.shape[2] // k.shape[2]
    seen = visible.any(1)[..., None, None]
    k = k.masked_fill(~seen, 0).repeat_interleave(group, 2)
    v = v.masked_fill(~seen, 0).repeat_interleave(group, 2)
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    logits = torch.einsum("bthd,bmhd->bthm", q, k) * softmax_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(torch.promote_types(q.dtype, torch.float32))
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    if sinks is not None:
        sink = sinks.to(logits.dtype)[:, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sink], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
    if logits.shape[-1] == 0:
        return torch.zeros_like(q), logits.new_full(logits.shape[:-1], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = logits.softmax(-1).masked_fill(lse.isneginf()[..., None], 0).to(q.dtype)
    return torch.einsum("bthm,bmhd->bthd", weights, v), lse


def expected(problem, *, tree=True, prefix=True, window=None, **options):
    """Return the oracle's `(out, lse)` of hybrid attention on `problem`, in its own dtype."""
    positions = torch.arange(problem.k_cache.shape[1], device=problem.q.device).expand(
        problem.q.shape[0], 1, -1
    )
    lengths = problem.cache_seqlens.long()[:, None, None]
    row = lengths + problem.row_depths[:, :, None]
    window = window if window is not None else 2**30
    in_prefix = (positions < lengths) & (positions > row - window)
    in_tree = problem.tree_mask & (lengths + problem.key_depths[:, None] > row - window)
    k = torch.cat([problem.k_cache, problem.k_tree], 1)
    v = torch.cat([problem.v_cache, problem.v_tree], 1)
    visible = torch.cat([in_prefix & prefix, in_tree & tree], -1)
    return dense_attention(problem.q, k, v, visible, **options)


def assert_accurate(actual, exact, torch_result=None, *, atol=0.0):
    """Fail unless `actual` errs at most twice as much as `torch_result` against float64 `exact`.

    `torch_result` is what PyTorch itself makes in the dtype of `actual`; without it `actual` must
    be right to float64. `atol` is for what PyTorch may hit by luck. Infinities must agree.
    """
    actual = actual.double()
    assert not actual.isnan().any(), "result has NaN"
    finite = exact.isfinite()
    assert torch.equal(actual[~finite], exact[~finite]), "infinities differ"
    error = (actual - exact)[finite].abs().amax().item() if finite.any() else 0.0
    if torch_result is None:
        allowed = 1e-11
    else:
        torch_error = (torch_result.double() - exact)[finite].abs()
        allowed = 2 * torch_error.amax().item() if finite.any() else 0.0
    assert error <= allowed + atol, f"error {error:.3e}, allowed {allowed:.3e} + {atol:.1e}"

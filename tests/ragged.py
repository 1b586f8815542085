"""Ragged batches for the tests of the primitives, and the same requests as uniform calls."""

from dataclasses import dataclass, replace

import torch
from hypothesis import note
from hypothesis import strategies as st
from specattn.reference import pack_tree_mask

from tests.cases import Problem, make_problem, restride


@dataclass(repr=False)
class Ragged:
    """A batch of requests of `rows[b]` query rows each, cut from a uniform `Problem`.

    What a request does not have holds what must not matter: columns of the mask behind its keys are
    random, and tree keys behind them in the cache are NaN.
    """

    whole: Problem
    rows: tuple[int, ...]
    q: torch.Tensor  # [tokens, Hq, D]
    k_tree: torch.Tensor  # [tokens, Hk, D]
    v_tree: torch.Tensor  # [tokens, Hk, D]
    tree_mask: torch.Tensor  # bool [tokens, max rows]
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]

    def request(self, index):
        """Return the uniform problem of one request that has rows."""
        p, count = self.whole.request(index), self.rows[index]
        cut = {name: getattr(p, name)[:, :count] for name in ("q", "k_tree", "v_tree")}
        mask, depths = p.tree_mask[:, :count, :count], p.key_depths[:, :count]
        return replace(p, **cut, tree_mask=mask, key_depths=depths)

    def requests(self):
        """Yield index, slice of rows and uniform problem of each request that has rows."""
        for index, count in enumerate(self.rows):
            if count > 0:
                first = int(self.cu_seqlens_q[index])
                yield index, slice(first, first + count), self.request(index)

    def to(self, dtype):
        """Return the same numbers in another floating dtype."""
        floating = {name: getattr(self, name).to(dtype) for name in ("q", "k_tree", "v_tree")}
        return replace(self, whole=self.whole.to(dtype), **floating)

    def arguments(self, *, paged=False, in_cache=False, mask="bool", new=False):
        """Return the keyword arguments of a ragged call; `mask` is "bool", "packed" or None.

        `new` names the tree's keys as the sparse primitive does, without `cache_seqlens`.
        """
        masks = {"bool": self.tree_mask, "packed": pack_tree_mask(self.tree_mask), None: None}
        names = ("k_new", "v_new") if new else ("k_tree", "v_tree")
        keys = (None, None) if in_cache else (self.k_tree, self.v_tree)
        lengths = {} if new else {"cache_seqlens": self.whole.cache_seqlens}
        return {
            "q": self.q,
            **self.whole.cache(paged),
            **lengths,
            **dict(zip(names, keys, strict=True)),
            "tree_mask": masks[mask],
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_q": max(self.rows),
        }


def make_ragged(rows=(3, 1, 0, 5), lengths=(5, 12, 7, 0), *, strided=False, **options):
    """Build a `Ragged` batch; `options` are those of `make_problem`."""
    p = make_problem(lengths, max(rows), strided=strided, **options)
    size = p.k_tree.shape[1]
    generator = torch.Generator().manual_seed(options.get("seed", 0))
    masks = torch.rand(sum(rows), size, generator=generator) < 0.5
    starts = torch.tensor([0, *rows]).cumsum(0)
    for b, count in enumerate(rows):
        masks[starts[b] : starts[b + 1], :count] = p.tree_mask[b, :count, :count]
        if options.get("tree_in_cache"):
            _hide_keys(p, b, lengths[b] + count, lengths[b] + size)
    q, k_tree, v_tree = (
        torch.cat([x[b, :count] for b, count in enumerate(rows)]) for x in (p.q, p.k_tree, p.v_tree)
    )
    if strided:
        q, k_tree, v_tree = restride(q), restride(k_tree), restride(v_tree)
    return Ragged(p, tuple(rows), q, k_tree, v_tree, masks, starts.int())


def _hide_keys(p, b, first, stop):
    """Fill positions of both caches with NaN."""
    page_size = p.k_pages.shape[1]
    for cache in (p.k_cache, p.v_cache):
        cache[b, first:stop] = torch.nan
    for position in range(first, stop):
        page = p.block_table[b, position // page_size]
        p.k_pages[page, position % page_size] = p.v_pages[page, position % page_size] = torch.nan


@st.composite
def ragged_batches(
    draw, max_length=40, max_rows=6, head_dims=(8, 64), dtypes=(torch.float64,), **fixed
):
    """Draw a `Ragged` batch: rows and lengths (zero included), trees, GQA, pages and strides."""
    batch = draw(st.integers(1, 4))
    rows = draw(st.lists(st.integers(0, max_rows), min_size=batch, max_size=batch).filter(any))
    lengths = st.lists(st.integers(0, max_length), min_size=batch, max_size=batch)
    kv_heads = draw(st.sampled_from([1, 2]))
    options = {
        "rows": tuple(rows),
        "lengths": tuple(draw(lengths)),
        "parents": draw(st.sampled_from([None, "chain"])),
        "q_heads": kv_heads * draw(st.sampled_from([1, 3, 4])),
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from(head_dims)),
        "page_size": draw(st.sampled_from([1, 4, 16])),
        "dtype": draw(st.sampled_from(dtypes)),
        "tree_in_cache": draw(st.booleans()),
        "strided": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }
    options |= fixed
    note(f"make_ragged(**{options})")
    return make_ragged(**options)


def lists_of(ragged, each="head", seed=0, size=9):
    """Return the arguments for a list of `each` "request", "head" or "row"; some are -1, the whole.

    What stands behind a list is no position.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths, heads = ragged.whole.cache_seqlens, ragged.k_tree.shape[1] if each == "head" else 1
    cached = lengths.repeat_interleave(torch.tensor(ragged.rows)) if each == "row" else lengths
    indices = torch.full((len(cached), heads, size), 2**30, dtype=torch.int32)
    counts = torch.zeros(len(cached), heads, dtype=torch.int32)
    for i, h in torch.ones_like(counts).nonzero().tolist():
        order = torch.randperm(int(cached[i]), generator=generator)[:size].int()
        indices[i, h, : len(order)] = order
        whole = torch.rand((), generator=generator) < 0.5
        counts[i, h] = -1 if whole else len(order)
    if each != "head":
        indices, counts = indices[:, 0], counts[:, 0]
    lists = {"indices": indices, "index_lengths": counts, "cache_seqlens": lengths}
    return lists | {"per_row": each == "row"}

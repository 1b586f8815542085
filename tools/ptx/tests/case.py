"""One call in the emulator: its sizes, its options, and the tensors that it is given."""

import mmap
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

import torch
from tests.cases import make_problem
from tests.eight_bits import meant, quantise
from tests.engine_layouts import in_engine
from tests.latents import make_latents, quantise_latents

from .types import DTYPES, EIGHT_BITS

_NO_RESERVE = 0x4000  # of Linux, without a name in mmap before Python 3.13


@dataclass(frozen=True)
class Case:
    """One call. ``rows`` are the tokens of a draft, ``group`` query heads share a KV head."""

    op: str
    dtype: str = "bf16"
    rows: int = 4
    head_dim: int = 64
    lengths: tuple = (300, 130, 0)
    group: int = 4
    kv_heads: int = 2
    paged: bool = False
    page_size: int = 16
    tree: str = "random"  # or "chain", "in_cache", "none"
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    per_head: bool = True
    split_size: int | None = 128  # or as on 132 multiprocessors, but at least 64 keys
    spare: int = 3  # room in the cache beyond the longest request
    ragged: tuple | None = None  # rows of each request, at most `rows`
    multiprocessors: int = 132
    block_m: int | None = None  # rows of a tile, if not as `_configs` says
    hopper: bool | None = None  # whether the Hopper kernel may serve it; else from 17 rows on
    layout: str = "SPNHC"  # of pages that are read or written: one of tests.engine_layouts
    cache_dtype: str | None = None  # of that cache, if not dtype
    stored: str | None = None  # what 8 bits the cache that is read holds
    scales: str = "tokens"  # of those: what `tests.eight_bits` calls its forms
    v_dim: int | None = None  # of values that are a view of the keys
    per_row: bool = False  # lists of indices
    first_unused: bool = False  # page 0 and node 0 of the tree, which then no row sees, are NaN
    far: str = ""  # what reaches beyond 2**31 elements: "pages", or "rows" of q and out

    def __str__(self):
        changed = [
            f"{f.name} {getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in ("op", "dtype", "rows", "head_dim")
            and getattr(self, f.name) != f.default
        ]
        return ", ".join([f"{self.op} {self.dtype} T {self.rows} D {self.head_dim}", *changed])

    @property
    def may_be_gluons(self):
        """Whether the Hopper kernel may serve it."""
        return self.rows * self.group > 16 if self.hopper is None else self.hopper

    @cached_property
    def problem(self):
        """The tensors; of a cache of 8 bits the numbers that it means, in float64."""
        if not self.stored:
            return self.given[0]
        numbers = meant(*self.given)
        if self.tree == "in_cache":
            places = numbers.cache_seqlens[:, None] + torch.arange(self.rows)
            requests = torch.arange(len(places))[:, None]
            numbers.k_tree = numbers.k_cache[requests, places]
            numbers.v_tree = numbers.v_cache[requests, places]
        return numbers

    @cached_property
    def given(self):
        """The tensors that a primitive is given, and scales by whether the cache is paged."""
        make = partial(make_latents, v_dim=self.v_dim) if self.v_dim else make_problem
        problem = make(
            self.lengths,
            self.rows,
            parents="chain" if self.tree == "chain" else None,
            q_heads=self.kv_heads * self.group,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            spare=self.spare,
            dtype=DTYPES[self.dtype],
            tree_in_cache=self.tree == "in_cache",
        )
        scales = {}
        if self.stored:
            stored = quantise_latents if self.v_dim else quantise
            problem, scales = stored(problem, EIGHT_BITS[self.stored], self.scales)
        if self.layout != Case.layout:
            problem = in_engine(problem, self.layout)
        if self.far == "pages":
            pages = far(problem.k_pages, 0), far(problem.v_pages, 0)
            problem = replace(problem, k_pages=pages[0], v_pages=pages[1])
        elif self.far == "rows":
            problem = replace(problem, q=far(problem.q, 1))
        return without_first(problem) if self.first_unused else problem, scales

    @property
    def cache(self):
        """The cache and its scales as keyword arguments."""
        problem, scales = self.given
        return problem.cache(self.paged) | scales.get(self.paged, {})

    @property
    def tree_tensors(self):
        """The tree's keys, values and mask as keyword arguments."""
        p, _ = self.given
        mask = None if self.tree == "chain" else p.tree_mask
        keys = (None, None) if self.tree == "in_cache" else (p.k_tree, p.v_tree)
        return {"k_tree": keys[0], "v_tree": keys[1], "tree_mask": mask}

    @property
    def sink_logits(self):
        """One sink per query head, if the case has sinks."""
        return torch.linspace(-2, 3, self.problem.q.shape[2]) if self.sinks else None


def far(x, dim):
    """Return a copy of which a dimension's second half begins 2**31 elements behind the first.

    Of its memory only what is written exists.
    """
    order = sorted(range(x.dim()), key=lambda axis: axis != dim)
    stride, strides = 1, [0] * x.dim()
    for axis in reversed(order[1:]):
        strides[axis], stride = stride, stride * x.shape[axis]
    strides[dim] = -(-(2**31) // (x.shape[dim] // 2) // 8) * 8
    size = (strides[dim] * (x.shape[dim] - 1) + stride) * x.element_size()
    room = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(room, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


def without_first(problem):
    """Return a problem with NaN where pointers of copies that move nothing point to."""
    problem.k_tree[:, 0] = problem.v_tree[:, 0] = torch.nan
    problem.tree_mask[:, :, 0] = False
    unheld = ~torch.isin(torch.arange(len(problem.k_pages)), problem.block_table)
    free = int(unheld.nonzero()[0])
    for pages in (problem.k_pages, problem.v_pages):
        pages[free], pages[0] = pages[0].clone(), torch.nan
    problem.block_table[problem.block_table == 0] = free
    return problem

"""Calls of the primitives in the emulator, each checked against float64 with the project's bound.

A `Case` is the smallest problem that still has what it is about: several tiles, several splits,
ragged lengths, a request without cached tokens, GQA. `QUICK` is what `make test` runs whatever has
changed, `SELECTED` what `make test-gpu-code` runs on both architectures, `ALL` what `make fuzz`
does.
"""

import itertools
import mmap
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial

import torch
from tests import gumbel
from tests.cases import assert_accurate, dense_attention, expected, make_problem
from tests.eight_bits import meant, quantise
from tests.latents import make_latents

import specattn
from specattn import reference

from ..launch import emulated
from ..machine import Options
from . import ragged, writes
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
    hopper: bool = True  # whether the Hopper kernel may serve it
    layout: str = "pages"  # of the cache that is written
    cache_dtype: str | None = None  # of that cache, if not dtype
    stored: str | None = None  # what 8 bits the cache that is read holds
    scales: str = "tokens"  # of those: what `tests.eight_bits` calls its forms
    v_dim: int | None = None  # of values that are a view of the keys
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
        if self.stored:
            return quantise(problem, EIGHT_BITS[self.stored], self.scales)
        if self.far == "pages":
            pages = far(problem.k_pages, 0), far(problem.v_pages, 0)
            problem = replace(problem, k_pages=pages[0], v_pages=pages[1])
        elif self.far == "rows":
            problem = replace(problem, q=far(problem.q, 1))
        return without_first(problem) if self.first_unused else problem, {}

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


@dataclass
class Outcome:
    """What an emulated call returned, and its launches."""

    results: list
    launches: list = field(default_factory=list)

    def same_bits(self, other):
        """Return whether another run of the case returned the same bits."""
        return all(
            torch.equal(_bits(x), _bits(y))
            for x, y in zip(self.results, other.results, strict=True)
        )


def _bits(x):
    return x.contiguous().view(torch.uint8)


def run(case, arch, options=None, change=None, emulate=None):
    """Execute a case and check it; `Fault` or AssertionError if it is wrong.

    ``emulate`` is what serves it instead of the Triton kernels.
    """
    call, _ = OPERATIONS[case.op]
    inputs = call(case)
    forced = {"split_size": case.split_size, "multiprocessors": case.multiprocessors}
    if emulate is None:
        emulate, forced["least"], forced["hopper"] = emulated, 64, case.hopper
    if case.block_m:
        forced["block_m"] = case.block_m
    with emulate(arch, options or Options(), change, **forced) as launches:
        results = inputs()
    for result, (exact, by_torch, atol) in zip(results, expectations(case), strict=True):
        assert_accurate(result, exact, by_torch, atol=atol)
    return Outcome(list(results), launches)


@lru_cache(maxsize=4)
def expectations(case):
    """Return (float64 result, what PyTorch makes in the dtype, tolerance) for every result."""
    return OPERATIONS[case.op][1](case)


# Together and copies late; one warp after the other in some order, copies early, blocks shuffled.
SCHEDULES = (Options(), Options(copies="issue", warps=1, blocks=1, count=False))
CUT_OFF = (Options(count=False, cut=True),)  # as coarse as tensor cores may be


def check(case, arch, schedules=SCHEDULES[:1], emulate=None):
    """Execute a case in several orders, which must agree in every bit; return the counts."""
    first, *others = (run(case, arch, options, emulate=emulate) for options in schedules)
    assert all(other.same_bits(first) for other in others), "the order shows in the result"
    return [(launched.name, launched.counts) for launched in first.launches]


def _state(oracle, dtype):
    """Return the expectations of an attention state; ``oracle`` maps a dtype to (out, lse)."""
    exact = oracle(torch.float64)
    # PyTorch keeps the log-sum-exp in float32 whatever the dtype.
    return [
        (exact[0], oracle(dtype)[0], 1e-6),
        (exact[1], oracle(torch.float32)[1], 2e-6),
    ]


def _attention(case, **options):
    return _state(lambda dtype: expected(case.problem.to(dtype), **options), DTYPES[case.dtype])


def _hybrid(case):
    p, _ = case.given
    return lambda: specattn.hybrid_tree_attention(
        p.q,
        cache_seqlens=p.cache_seqlens,
        **case.cache,
        **case.tree_tensors,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sink_logits,
        out=far(torch.full_like(p.q, torch.nan), 1) if case.far == "rows" else None,
    )


def _expect_hybrid(case):
    return _attention(case, window=case.window, softcap=case.softcap, sinks=case.sink_logits)


def _tree(case):
    p = case.problem
    return lambda: specattn.tree_attention(
        p.q, p.k_tree, p.v_tree, p.tree_mask, softcap=case.softcap
    )


def _expect_tree(case):
    return _attention(case, prefix=False, softcap=case.softcap)


def _verify(case):
    p, collect = case.given[0], case.op
    return lambda: specattn.verify_attention(
        p.q,
        cache_seqlens=p.cache_seqlens,
        **case.cache,
        **case.tree_tensors,
        **_verify_options(case),
        collect=collect,
    )


def _verify_options(case):
    options = {"window": case.window, "softcap": case.softcap, "collect_rows": (0, -1)}
    return options | ({"per_head": case.per_head} if case.op == "scores" else {})


def _expect_verify(case):
    def collected(dtype):
        x = case.problem.to(dtype)
        tensors = x.cache(False) | {
            "k_tree": x.k_tree,
            "v_tree": x.v_tree,
            "tree_mask": x.tree_mask,
        }
        return reference.verify_attention(
            x.q, cache_seqlens=x.cache_seqlens, collect=case.op, **tensors, **_verify_options(case)
        )[2]

    exact = collected(torch.float64)
    # Logits are rounded once.
    last = (exact.bfloat16(), 1e-6) if case.op == "logits" else (collected(torch.float32), 2e-6)
    state = _attention(case, window=case.window, softcap=case.softcap)
    return [*state, (exact, *last)]


def _selection(case):
    """Return (which cached tokens are chosen [B, Hk, N], their indices, how many)."""
    generator = torch.Generator().manual_seed(1)
    (_, capacity, heads), p = case.problem.k_cache.shape[:3], case.problem
    live = torch.arange(capacity) < p.cache_seqlens[:, None, None]
    shape = (len(case.lengths), heads, capacity)
    chosen = live & (torch.rand(shape, generator=generator) < 0.6)
    never_read = 2**30
    indices = torch.where(chosen, torch.arange(capacity), never_read).sort(-1).values.int()
    return chosen, indices, chosen.sum(-1).int()


def _gather(case):
    p, (_, indices, lengths) = case.given[0], _selection(case)
    names = {"k_new": p.k_tree, "v_new": p.v_tree, "tree_mask": p.tree_mask}
    tree = names if case.tree != "none" else {}
    return lambda: specattn.sparse_gather_attention(
        p.q,
        indices=indices,
        index_lengths=lengths,
        **tree,
        **case.cache,
        sinks=case.sink_logits,
    )


def _expect_gather(case):
    chosen, with_tree = _selection(case)[0], case.tree != "none"

    def head_state(x, head):
        h = slice(head * case.group, (head + 1) * case.group)
        k = torch.cat([x.k_cache, x.k_tree], 1)[:, :, head : head + 1]
        v = torch.cat([x.v_cache, x.v_tree], 1)[:, :, head : head + 1]
        in_prefix = chosen[:, head, None].expand(-1, case.rows, -1)
        visible = torch.cat([in_prefix, x.tree_mask & with_tree], -1)
        sinks = case.sink_logits[h].to(x.q.dtype) if case.sinks else None
        return dense_attention(x.q[:, :, h], k, v, visible, sinks=sinks)

    def oracle(dtype):
        x = case.problem.to(dtype)
        states = [head_state(x, head) for head in range(case.kv_heads)]
        return [torch.cat(parts, 2) for parts in zip(*states, strict=True)]

    return _state(oracle, DTYPES[case.dtype])


def _importance_arguments(case, dtype=None):
    p = case.given[0] if dtype is None else case.problem.to(dtype)
    tensors = case.cache if dtype is None else p.cache()
    tensors = {name: x for name, x in tensors.items() if name not in ("v_cache", "v_scale")}
    return tensors | {"q": p.q, "cache_seqlens": p.cache_seqlens, "per_head": case.per_head}


def _importance(case):
    return lambda: (specattn.importance_scores(**_importance_arguments(case)),)


def _expect_importance(case):
    exact, by_torch = (
        reference.importance_scores(**_importance_arguments(case, dtype))
        for dtype in (torch.float64, torch.float32)
    )
    return [(exact, by_torch, 2e-6)]


def _scores_to_select(case):
    generator = torch.Generator().manual_seed(2)
    shape = (len(case.lengths), case.kv_heads, max(case.lengths) + 3)
    return torch.randint(-20, 20, shape, generator=generator).float()  # with ties


def _select_options():
    return {"ratio": 0.3, "min_tokens": 5, "keep_first": 2, "keep_last": 3}


def _select(case):
    scores, lengths = _scores_to_select(case), case.problem.cache_seqlens
    return lambda: specattn.select_topk(scores, lengths, **_select_options())


def _expect_select(case):
    lengths = case.problem.cache_seqlens
    exact = reference.select_topk(_scores_to_select(case), lengths, **_select_options())
    return [(x.double(), x, 0.0) for x in exact]  # equality


def _states(case):
    """Return five stacked states, some of them empty with NaN as output."""
    generator = torch.Generator().manual_seed(3)
    shape = (5, len(case.lengths), case.rows, case.group * case.kv_heads)
    outs = torch.randn(*shape, case.head_dim, generator=generator).to(DTYPES[case.dtype])
    lses = torch.randn(shape, generator=generator) * 8
    lses = lses.masked_fill(torch.rand(shape, generator=generator) < 0.4, -torch.inf)
    return outs.masked_fill(lses.isinf()[..., None], torch.nan), lses


def _merge(case):
    outs, lses = _states(case)
    if case.op == "merge_states":
        return lambda: specattn.merge_states(outs, lses)
    return lambda: specattn.merge_state(
        outs[0].clone(), lses[0].clone(), outs[1].clone(), lses[1].clone()
    )


def _expect_merge(case):
    outs, lses = (x if case.op == "merge_states" else x[:2] for x in _states(case))
    exact = reference.merge_states(outs.double(), lses.double())
    return list(zip(exact, reference.merge_states(outs, lses), (1e-6, 2e-6), strict=True))


def _gumbel_arguments(case, dtype):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(case.rows, 1500, generator=generator).to(DTYPES[case.dtype])
    requests, positions = torch.arange(2 * case.rows).view(2, -1)
    return logits.to(dtype), 2**40 + 3, requests, positions


def _gumbel(case):
    return lambda: (specattn.add_gumbel_noise(*_gumbel_arguments(case, DTYPES[case.dtype])),)


def _expect_gumbel(case):
    exact, by_torch = (
        reference.add_gumbel_noise(*_gumbel_arguments(case, dtype))
        for dtype in (torch.float64, torch.float32)
    )
    return [(exact, by_torch, gumbel.TOLERANCE)]


OPERATIONS = {
    "hybrid": (_hybrid, _expect_hybrid),
    "tree": (_tree, _expect_tree),
    "scores": (_verify, _expect_verify),
    "logits": (_verify, _expect_verify),
    "gather": (_gather, _expect_gather),
    "importance": (_importance, _expect_importance),
    "select": (_select, _expect_select),
    "gumbel": (_gumbel, _expect_gumbel),
    "merge_state": (_merge, _expect_merge),
    "merge_states": (_merge, _expect_merge),
    "write": (writes.call_of, writes.expect),
}
for _name in ragged.NAMES:
    OPERATIONS[_name] = (
        lambda case: ragged.call_of(case, DTYPES[case.dtype]),
        lambda case: ragged.expect(case, DTYPES[case.dtype]),
    )


# The Hopper kernel: TMA, in pieces and in pages, and row by row; 64 and 128 rows, some of them
# missing; trees across tiles; everything that masks.
SOME = {"rows": 16, "kv_heads": 1, "lengths": (200, 9, 0)}
HOPPER = [
    Case("hybrid", rows=16, lengths=(700,), kv_heads=1, split_size=1024),  # its ring comes round
    Case("scores", rows=32, lengths=(700,), kv_heads=1, split_size=1024, window=600),
    Case("logits", **SOME, paged=True, window=150, softcap=2.0, sinks=True, spare=70),
    Case("hybrid", "fp16", rows=10, lengths=(330, 64), group=5, paged=True, page_size=64),
    Case("hybrid", rows=17, group=8, lengths=(290, 30), kv_heads=1),
    Case("hybrid", **SOME, head_dim=128),
    Case("hybrid", **SOME, head_dim=128, paged=True, tree="in_cache", window=37),
    Case("hybrid", **SOME, tree="in_cache"),
    Case("hybrid", **SOME, tree="chain", window=9, sinks=True),
    Case("hybrid", **SOME, split_size=None, spare=2000, window=500),
    Case("hybrid", "fp16", rows=9, group=7, kv_heads=1, lengths=(150,), split_size=4096),
    Case("hybrid", rows=35, group=1, lengths=(90, 0), window=2, kv_heads=1),
    Case("hybrid", rows=70, group=1, lengths=(130, 0), window=40, kv_heads=1),
    Case("hybrid", rows=40, group=5, lengths=(70, 0), kv_heads=1),  # two tiles of rows
    Case("hybrid", rows=33, group=3, lengths=(300,), paged=True, page_size=128, kv_heads=1),
    Case("hybrid", rows=32, lengths=(300, 5), head_dim=128, kv_heads=1, softcap=3.0),
    Case("logits", **SOME, head_dim=128, tree="chain"),
    Case("logits", "fp16", rows=32, lengths=(150, 0), paged=True, window=99, kv_heads=1),
    Case("logits", rows=21, group=3, lengths=(300, 20), softcap=2.0, tree="in_cache"),
    Case("logits", rows=40, lengths=(100, 3), kv_heads=1, paged=True, page_size=32),
    Case("scores", **SOME, paged=True, window=150),
    Case("scores", rows=32, head_dim=128, lengths=(300, 5), kv_heads=1, window=20),
    Case("scores", "fp16", rows=21, group=3, lengths=(300, 20), per_head=False),
    Case("scores", rows=40, group=5, lengths=(70, 0), kv_heads=1),  # two tiles of rows
    Case("scores", **SOME, softcap=2.0),  # the mean of logits
    Case("ragged scores", rows=16, ragged=(16, 0, 3), lengths=(150, 40, 200), window=60),
    Case("ragged hybrid", rows=16, ragged=(16, 1, 0), lengths=(200, 130, 0), kv_heads=1),
    Case("ragged hybrid", rows=16, ragged=(16, 5, 2), lengths=(150, 40, 200), tree="in_cache"),
    Case(
        "ragged hybrid", rows=40, head_dim=128, ragged=(40, 1, 0, 33), lengths=(150, 40, 200, 0),
        window=90, paged=True, kv_heads=1, tree="chain",
    ),
    Case("hybrid", rows=150, group=1, kv_heads=1, tree="chain", lengths=(70,), window=40),
]  # fmt: skip

# Caches of 8 bits: every type by every way it is read, scales of tokens, heads and none.
EIGHT = [
    Case("hybrid", lengths=(200, 9), stored="e4m3", scales="heads", kv_heads=1),
    Case("scores", "fp16", rows=1, lengths=(90, 0), stored="e4m3", paged=True),
    Case("hybrid", rows=16, lengths=(150, 0), stored="int8", paged=True, kv_heads=1, softcap=2.0),
    Case("hybrid", "fp16", lengths=(150, 0), stored="e5m2", tree="in_cache", window=40),
    Case("gather", lengths=(200, 0), stored="int8", paged=True, head_dim=80),
    Case("logits", lengths=(150, 0), stored="e5m2", window=99, scales="heads"),
    Case("importance", lengths=(150, 0), stored="e4m3", per_head=False),
    Case("write", "bf16", stored="e4m3"),
    Case("write", "fp16", stored="int8", scales="heads", head_dim=80),
]

# Latents: rows of one head in tiles of 16 and of 64, which come to be several.
LATENT = {"head_dim": 576, "v_dim": 512, "kv_heads": 1, "split_size": 64}
LATENTS = [
    Case("hybrid", **LATENT, group=16, lengths=(100, 0)),
    Case("hybrid", **LATENT, rows=2, group=8, lengths=(90, 5), paged=True, window=40, softcap=2.0),
    Case("hybrid", "fp16", **LATENT, rows=9, group=8, lengths=(70,), tree="in_cache", sinks=True),
    Case("hybrid", **LATENT, rows=70, group=1, lengths=(40,), tree="chain"),
    Case("scores", **LATENT, rows=3, group=8, lengths=(90, 0), window=70),
    Case("logits", **LATENT, group=16, lengths=(90, 0), paged=True),
    Case("gather", **LATENT, group=16, lengths=(90, 0), paged=True),
    Case("tree", **LATENT, rows=20, group=2),
    Case("hybrid", head_dim=80, v_dim=64, lengths=(90, 40, 0)),
    Case("importance", head_dim=576, v_dim=512, kv_heads=1, lengths=(90, 0)),
    Case("merge_states", head_dim=512, lengths=(1,), rows=3),
]

# What always runs: every primitive, each kernel of attention once.
QUICK = [
    Case("hybrid", sinks=True),
    *HOPPER[:2],  # whose rings of buffers come round, for one group of rows and for two
    Case("gather", "fp16", rows=1, head_dim=80, paged=True),
    Case("hybrid", rows=17, group=8, lengths=(90,), kv_heads=1, split_size=64, hopper=False),
    Case("scores", lengths=(300, 9, 0), split_size=None, spare=500),
    Case("ragged logits", rows=9, lengths=(70, 9), ragged=(9, 3), window=3, block_m=16),
    Case("importance", head_dim=80, paged=True),
    Case("select"),
    Case("merge_states", rows=3),
    Case("write", "fp32", head_dim=80, layout="heads first", cache_dtype="bf16"),
    Case("gumbel"),
    *EIGHT[:2],
    LATENTS[0],
]

# 16-bit and float32, mma.sync and wgmma (64 rows), padded D, every feature.
SELECTED = [
    *QUICK,
    *EIGHT[2:],
    *LATENTS[1:],
    Case("hybrid", lengths=(700, 90, 0), split_size=None, spare=2000, sinks=True, window=500),
    Case("hybrid", lengths=(200, 0), split_size=4096, sinks=True),  # one launch
    Case("hybrid", rows=16, head_dim=128, paged=True, softcap=2.0),
    *HOPPER[2:5],
    Case("hybrid", lengths=(40, 9), kv_heads=1, paged=True, far="pages"),
    Case("hybrid", lengths=(300,), kv_heads=1, far="rows"),
    Case("scores", rows=16, lengths=(40,), kv_heads=1, far="rows"),  # by the Hopper kernel too
    Case("ragged hybrid", lengths=(90, 70, 0), ragged=(1, 33, 0), tree="chain", kv_heads=1),
    Case("hybrid", rows=70, group=1, lengths=(90, 0), window=50, kv_heads=1, tree="chain"),
    Case("scores", rows=16, window=100),
    Case("hybrid", rows=35, group=1, lengths=(90, 0), window=2, kv_heads=1),  # cuts the tree
    Case("logits", "fp32", paged=True, window=100),
    Case("importance", lengths=(700, 80, 0), multiprocessors=1),  # many tiles of keys to a program
    Case(
        "ragged hybrid", lengths=(200, 9, 0), ragged=(3, 0, 1), paged=True, tree="chain", window=99
    ),
    Case("ragged scores", lengths=(200, 9, 0), ragged=(1, 6, 0), block_m=16),
    Case("ragged logits", "fp16", lengths=(200, 9, 0), ragged=(1, 6, 0), block_m=16, window=99),
    Case("ragged gather", "fp16", lengths=(200, 9, 0), ragged=(2, 3, 0), head_dim=80, paged=True),
]

ATTENTION = [
    {},
    {"paged": True},
    {"window": 100},
    {"paged": True, "window": 37, "softcap": 2.0, "sinks": True},
    {"tree": "chain"},
    {"tree": "in_cache", "paged": True},
]
SIZES = [(dtype, rows, D) for dtype in DTYPES for rows in (1, 4, 16, 64) for D in (64, 80, 128)]


def _all():
    """Every size with prefix and tree; the other operations and the options in turn."""
    for number, (dtype, rows, D) in enumerate(SIZES):
        size = {"dtype": dtype, "rows": rows, "head_dim": D}
        if rows == 64:  # four tiles of rows
            size |= {"lengths": (200, 0), "kv_heads": 1}
        yield Case("hybrid", **size, **ATTENTION[number % len(ATTENTION)])
        options = ATTENTION[number // 2 % 3] | {"softcap": 2.0 * (number % 8 > 5)}
        yield Case("scores" if number % 2 else "logits", **size, **options)
        if number % 2:
            yield Case("gather", **size, paged=number % 4 == 3, sinks=number % 3 == 1)
        if rows == 4:
            yield Case("tree", **size)
            yield Case("merge_states", **size)
            yield Case("merge_state", **size)
            yield Case("importance", **size, paged=number % 2 == 1, per_head=number % 4 < 2)
    yield Case("select", lengths=(2500, 1030, 0))
    yield Case("select", lengths=(17000, 40), kv_heads=1)  # more than registers hold
    yield Case("ragged hybrid", rows=16, head_dim=128, kv_heads=1, ragged=(16, 1, 0))  # wgmma
    for op in ("scores", "logits", "gather"):  # 128 rows
        yield Case(
            op, rows=40, lengths=(150, 70), kv_heads=1, window=None if op == "gather" else 99
        )
    for dtype in DTYPES:  # prompts
        size = {"dtype": dtype, "rows": 150, "group": 1, "kv_heads": 1, "tree": "chain"}
        yield Case("hybrid", **size, lengths=(70,))
        yield Case("logits", **size, lengths=(70,), paged=True, window=90, softcap=2.0)
        yield Case("ragged hybrid", **size, lengths=(70, 9, 0), ragged=(67, 1, 0), paged=True)
    for dtype, D in (("bf16", 64), ("bf16", 128), ("fp16", 80), ("fp32", 64), ("fp32", 80)):
        size = {"dtype": dtype, "head_dim": D, "kv_heads": 1, "lengths": (300, 130, 60, 0)}
        yield Case("ragged hybrid", **size, ragged=(1, 20, 0, 5))
        yield Case("ragged hybrid", **size, ragged=(2, 1, 3, 3), tree="in_cache", paged=True)
        yield Case("ragged scores", **size, ragged=(1, 9, 0, 5), window=100, block_m=16)
        yield Case("ragged logits", **size, ragged=(1, 9, 0, 5), paged=True, block_m=16)
        yield Case("ragged gather", **size, ragged=(1, 4, 0, 5), softcap=2.0)
    for rows in (4, 16):
        size = {"rows": rows, "head_dim": 256, "kv_heads": 1, "lengths": (200, 40, 0)}
        yield Case("hybrid", **size, paged=True, window=60, softcap=2.0)
        yield Case("hybrid", **size, paged=True, window=60, tree="in_cache")
        yield Case("gather", **size, paged=True)
        yield Case("logits", **size, paged=True, window=60)
    for dtype, to in itertools.product(DTYPES, DTYPES):
        yield Case("write", dtype, cache_dtype=to)
        yield Case("write", dtype, rows=6, head_dim=80, layout="interleaved", cache_dtype=to)
    for stored, scales in itertools.product(EIGHT_BITS, ("tokens", "heads", "none")):
        size = {"lengths": (200, 70), "kv_heads": 1, "stored": stored, "scales": scales}
        yield Case("hybrid", **size)
        yield Case("hybrid", "fp16", rows=16, head_dim=128, **size, paged=True, tree="in_cache")
        yield Case("scores", "fp32", **size, window=60)
        yield Case("logits", rows=32, **size, paged=True, window=60, softcap=2.0)
        yield Case("gather", "fp16", rows=8, head_dim=80, **size)
        yield Case("importance", **size, paged=True)
        yield Case("write", "fp32", stored=stored, scales=scales)
    yield Case("hybrid", rows=20, group=7, kv_heads=1, lengths=(200,))
    yield Case("scores", rows=3, group=7, per_head=False)
    yield Case("gather", rows=16, head_dim=128, tree="none")


ALL = SELECTED + [case for case in [*HOPPER, *_all()] if case not in SELECTED]

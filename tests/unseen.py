"""Calls of attention in which some keys or values are NaN or infinite, and what rows may say then.

A call is made twice: with ordinary numbers, and with `Bad` ones in a few places. A row that sees
none of these must say the very same, bit by bit where `exact`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import note
from hypothesis import strategies as st
from specattn.reference import pack_tree_mask

import specattn
from tests.cases import make_problem, random_parents
from tests.eight_bits import meant, quantise
from tests.latents import make_latents

NAN, INF = torch.nan, torch.inf


class Bad(NamedTuple):
    """Numbers of one key that are none."""

    request: int
    in_tree: bool
    index: int  # of a node, or a position in the cache; counted modulo what there is
    head: int
    part: str  # of PARTS
    channel: int | None  # None: all of them
    value: float


PARTS = ("k", "v", "k_scale", "v_scale")
BAD = st.builds(
    Bad,
    request=st.integers(0, 3),
    in_tree=st.booleans(),
    index=st.integers(0, 2**10),
    head=st.integers(0, 1),
    part=st.sampled_from(PARTS),
    channel=st.none() | st.integers(0, 600),
    value=st.sampled_from((NAN, INF, -INF)),
)


def places_of(p, request, position):
    """Return where a cached token lies, in the contiguous and in the paged cache."""
    page_size, places = p.k_pages.shape[1], [("cache", (request, position))]
    column = position // page_size
    if column < p.block_table.shape[1] and p.block_table[request, column] < len(p.k_pages):
        page = int(p.block_table[request, column])
        places.append(("pages", (page, position % page_size)))
    return places


def _write(p, scales, bad):
    """Write a bad number into a problem, wherever the key lies."""
    b, size, part = bad.request % len(p.q), p.k_tree.shape[1], bad.part[0]
    length, head = int(p.cache_seqlens[b]), bad.head % p.k_cache.shape[2]
    channel = bad.channel
    channel = slice(None) if channel is None else channel % getattr(p, f"{part}_cache").shape[-1]
    if bad.in_tree:
        getattr(p, f"{part}_tree")[b, bad.index % size, head, channel] = bad.value
    position = length + bad.index % size if bad.in_tree else bad.index % max(1, length)
    if position >= p.k_cache.shape[1]:
        return
    for name, place in places_of(p, b, position):
        place = (*place, head)
        scale = scales[name == "pages"].get(f"{part}_scale")
        if bad.part.endswith("scale") and isinstance(scale, torch.Tensor) and scale.dim() == 3:
            scale[place] = bad.value
            continue
        cache = getattr(p, f"{part}_{name}")
        if cache.is_floating_point():  # int8 has no such number
            row = cache[place].float()
            row[channel] = NAN if cache.dtype == torch.float8_e4m3fn else bad.value
            cache[place] = row.to(cache.dtype)


@dataclass(repr=False)
class Unseen:
    """A call with ordinary numbers, the same with bad ones, and which row sees which key."""

    function: object
    ordinary: dict
    bad: dict
    visible: torch.Tensor  # bool [B, T, Hk, M]
    k: torch.Tensor  # the bad call's keys as numbers, [B, M, Hk, D]
    v: torch.Tensor
    collected: list | None  # the rows whose logits are collected

    def _repr_pretty_(self, printer, _):
        printer.text("made as noted")

    def check(self, exact=True, device="cpu", whole_rows=False):
        """Compare both calls; with ``whole_rows`` a row that sees a bad value may be all NaN."""
        ordinary, found = (self._call(x, device) for x in (self.ordinary, self.bad))
        group = found[0].shape[2] // self.k.shape[2]
        seen = self.visible.double()

        def rows_that_see(what):  # [B, M, Hk, ..] -> [B, T, Hq, ..]
            met = torch.einsum("bthm,bmh...->bth...", seen, what.double()) > 0
            return met.repeat_interleave(group, 2)

        k_bad = rows_that_see(~self.k.isfinite().all(-1))
        k_nan = rows_that_see(self.k.isnan().any(-1))
        v_bad, v_nan = (rows_that_see(x) for x in (~self.v.isfinite(), self.v.isnan()))
        out, lse = found[:2]
        assert lse[k_nan].isnan().all(), "a row saw a key of NaN"
        assert out[k_nan].isnan().all(), "a row saw a key of NaN"
        # An infinite key may give a logit of -inf, which is as good as a key that is not seen.
        v_bad, v_nan = (x & ~k_bad[..., None] for x in (v_bad, v_nan))
        assert out[v_nan].isnan().all(), "a row saw a value of NaN"
        assert not out[v_bad].isfinite().any(), "a row saw an infinite value"
        row_bad = rows_that_see(~self.v.isfinite().all(-1)) & whole_rows
        clean = ~(k_bad | row_bad & lse.isnan())
        same(lse[clean], ordinary[1][clean], exact)
        clean = ~(k_bad[..., None] | v_bad | row_bad[..., None] & out.isnan())
        same(out[clean], ordinary[0][clean], exact)
        if self.collected is not None:
            self._check_collected(found[2], ordinary[2], exact)

    def _call(self, arguments, device):
        arguments = {
            name: x.to(device) if isinstance(x, torch.Tensor) else x
            for name, x in arguments.items()
        }
        return [x.cpu() for x in self.function(**arguments)]

    def _check_collected(self, found, ordinary, exact):
        """Compare scores [B, Hk, N] or logits [B, R, Hq, N], whose rows see what lies there."""
        N = found.shape[-1]
        keys = self.k[:, :N].transpose(1, 2)[:, :, None]  # [B, Hk, 1, N, D]
        seen = self.visible[..., :N][:, self.collected].transpose(1, 2)  # [B, Hk, R, N]
        bad, nan = ~keys.isfinite().all(-1), keys.isnan().any(-1)
        if found.dim() == 3:
            seen, bad, nan = seen.all(2), bad[:, :, 0], nan[:, :, 0]
        else:
            g = found.shape[2] // keys.shape[1]
            seen, bad, nan = (x.transpose(1, 2).repeat_interleave(g, 2) for x in (seen, bad, nan))
        assert found[~seen].isneginf().all(), "collected of a row that does not see it"
        same(found[~(seen & bad)], ordinary[~(seen & bad)], exact)
        assert found[seen & nan].isnan().all(), "collected of a row that sees a NaN"


def same(found, wanted, exact):
    """Fail unless numbers are the same, or nearly."""
    assert not found.isnan().any(), "NaN of what is not seen"
    if exact:
        assert torch.equal(found, wanted), "what is not seen changed bits"
    else:
        few = 4 * torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, wanted, rtol=few, atol=few)


def _visible(p, window):
    """Return which row sees which key of the cache and of the tree, bool [B, T, N], [B, T, S]."""
    lengths = p.cache_seqlens.long()[:, None, None]
    start = lengths + p.row_depths[:, :, None] - (window or 2**30)
    positions = torch.arange(p.k_cache.shape[1])
    prefix = (positions < lengths) & (positions > start)
    return prefix, p.tree_mask & (lengths + p.key_depths[:, None] > start)


def _listed(p, each, generator):
    """Return lists of positions, and which row sees which cached token, bool [B, T, Hk, N]."""
    (B, T), (N, Hk) = p.q.shape[:2], p.k_cache.shape[1:3]
    shape = {"request": (B,), "head": (B, Hk), "row": (B, T)}[each]
    lengths = p.cache_seqlens.view(B, *[1] * (len(shape) - 1)).expand(shape)
    taken = torch.rand(*shape, N, generator=generator) < 0.6
    taken &= torch.arange(N) < lengths[..., None]
    counts = taken.sum(-1, dtype=torch.int32)
    indices = torch.full((*shape, N), 2**30, dtype=torch.int32)
    for place in torch.ones(shape).nonzero().tolist():
        chosen = taken[tuple(place)].nonzero()[:, 0].int()
        indices[tuple(place)][: len(chosen)] = chosen
    lists = {"indices": indices, "index_lengths": counts}
    lists |= {"per_row": True} if each == "row" else {}
    seen = {"request": taken[:, None, None], "head": taken[:, None], "row": taken}[each]
    return lists, (seen[:, :, None] if each == "row" else seen).expand(B, T, Hk, N)


def make_unseen(
    bads,
    lengths=(70, 5),
    rows=5,
    *,
    form="hybrid",
    tree_size=None,
    tree="own",
    mask="packed",
    where="apart",
    paged=False,
    window=None,
    stored=None,
    latents=False,
    collect=None,
    options=(),
    **sizes,
):
    """Build an `Unseen` call of attention with the numbers `bads`.

    form: "hybrid", "verify", "gather by request", "gather by head", "gather by row", "tree". tree:
    "own" of each request, "one" of all, or a "chain". where: the tree's keys lie "apart" or in the
    "cache". mask: "packed", "bool", or of chains None. stored: type and form of scales of 8 bits.
    """
    size = tree_size or rows
    generator = torch.Generator().manual_seed(sizes.get("seed", 0))
    one = {"own": None, "one": random_parents(size, generator), "chain": "chain"}[tree]
    sizes |= {"tree_size": size, "parents": one, "tree_in_cache": where == "cache"}
    problems, scales = [], []
    for bad in (False, True):
        p = (make_latents if latents else make_problem)(lengths, rows, **sizes)
        scale = {False: {}, True: {}}
        if stored:
            p, scale = quantise(p, *stored)
        for one_bad in bads if bad else ():
            _write(p, scale, one_bad)
        problems.append(p), scales.append(scale)
    p = problems[1]
    prefix, in_tree = _visible(p, window)
    visible = torch.cat([prefix, in_tree], -1)[:, :, None].expand(-1, -1, p.k_cache.shape[2], -1)
    words = p.tree_mask[0] if tree == "one" else p.tree_mask
    words = {"packed": pack_tree_mask, "bool": torch.clone}[mask](words) if mask else None
    given = dict(options)
    if form.startswith("gather"):
        lists, listed = _listed(p, form.split()[-1], generator)
        visible = torch.cat([listed, visible[..., prefix.shape[-1] :]], -1)
        given |= lists
    elif form != "tree":
        given |= {"cache_seqlens": p.cache_seqlens, "window": window}
    if form == "verify":
        given |= {"collect": collect, "collect_rows": (0, -1)}
    calls = [_arguments(x, y, form, where, paged) for x, y in zip(problems, scales, strict=True)]
    ordinary, bad = (x | given | {"tree_mask": words} for x in calls)
    k, v = _numbers(p, scales[1] if stored else None, where)
    if form == "tree":
        visible = visible[..., prefix.shape[-1] :]
        k, v = k[:, prefix.shape[-1] :], v[:, prefix.shape[-1] :]
    function = {"v": specattn.verify_attention, "h": specattn.hybrid_tree_attention}
    function |= {"g": specattn.sparse_gather_attention, "t": specattn.tree_attention}
    collected = [0, -1] if form == "verify" else None
    return Unseen(function[form[0]], ordinary, bad, visible, k, v, collected)


def _arguments(p, scales, form, where, paged):
    """Return what names a problem's queries, keys and values."""
    new = ("k_new", "v_new") if form[0] in "gt" else ("k_tree", "v_tree")
    tree = (p.k_tree, p.v_tree) if where == "apart" else (None, None)
    arguments = {"q": p.q, **dict(zip(new, tree, strict=True))}
    if form != "tree":
        arguments |= p.cache(paged) | {n: x for n, x in scales[paged].items() if x is not None}
    return arguments


def _numbers(p, scales, where):
    """Return all keys and all values, [B, N + S, Hk, D], as numbers; those beyond a cache are 0."""
    numbers = meant(p, scales) if scales else p.to(torch.float64)
    for name, scale in (scales[False] if scales else {}).items():
        if (
            isinstance(scale, torch.Tensor) and scale.dim() == 3
        ):  # of zeros, too: it may multiply sums
            cache = getattr(numbers, f"{name[0]}_cache")
            cache[scale.isinf()] = INF
    S, found = p.k_tree.shape[1], []
    for name in ("k", "v"):
        cache, tree = getattr(numbers, f"{name}_cache"), getattr(numbers, f"{name}_tree")
        if where == "cache":
            nodes = p.cache_seqlens.long()[:, None] + torch.arange(S)
            tree = cache[torch.arange(len(nodes))[:, None], nodes]
        beyond = torch.arange(cache.shape[1]) >= p.cache_seqlens[:, None]
        found.append(torch.cat([cache.masked_fill(beyond[..., None, None], 0), tree], 1))
    return found


@st.composite
def unseen_calls(draw, dtypes, eight_bits=True, most_rows=20, max_length=140):
    """Draw a call of `make_unseen`: any form, with a few bad numbers anywhere."""
    forms = ["hybrid", "verify", "tree", "gather by request", "gather by head", "gather by row"]
    form = draw(st.sampled_from(forms))
    rows, tree = draw(st.integers(1, most_rows)), draw(st.sampled_from(("own", "one", "chain")))
    cached = form in ("hybrid", "verify")
    where = draw(st.sampled_from(("apart", "cache"))) if cached else "apart"
    latents = draw(st.booleans())
    stored = None
    if eight_bits and form != "tree" and not latents and draw(st.booleans()):
        types = st.sampled_from((torch.int8, torch.float8_e4m3fn, torch.float8_e5m2))
        stored = draw(types), draw(st.sampled_from(("none", "heads", "tokens", "inline")))
    arguments = {
        "bads": draw(st.lists(BAD, min_size=1, max_size=4)),
        "lengths": tuple(draw(st.lists(st.integers(0, max_length), min_size=1, max_size=3))),
        "rows": rows,
        "form": form,
        "tree_size": rows + draw(st.sampled_from((0, 0, 1, 70))) if where == "apart" else rows,
        "tree": tree,
        "mask": draw(st.sampled_from(("packed", "bool", *[None] * (tree == "chain")))),
        "where": where,
        "paged": draw(st.booleans()) and form != "tree",
        "window": draw(st.sampled_from((None, None, 1, 3, 20, 100))) if cached else None,
        "stored": stored,
        "latents": latents,
        "collect": draw(st.sampled_from(("scores", "logits"))) if form == "verify" else None,
        "options": tuple(draw(st.sampled_from(((), (("softcap", 5.0),))))),
        "kv_heads": 1 if latents else draw(st.sampled_from((1, 2))),
        "q_heads": draw(st.sampled_from((2, 4, 8))),
        "head_dim": draw(st.sampled_from((16, 24, 64, 80))),
        "dtype": draw(st.sampled_from(dtypes)),
        "page_size": draw(st.sampled_from((1, 16))),
        "seed": draw(st.integers(0, 2**16)),
    }
    if latents:
        arguments |= {"v_dim": draw(st.sampled_from((16, 8))), "shared": True}
    note(f"make_unseen(**{arguments})")
    return make_unseen(**arguments)

"""The backend of flash-attn over stand-ins: theirs has not been run here."""

import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import specattn
from specattn.backends import flash_attn, select, winners
from specattn.backends.flash_attn import chains, libraries
from tests.cases import assert_accurate, expected, make_problem

from . import flash_attn_stand_in as stand_in

INTERFACES = {
    "flash-attn-4": ((10, 0), "flash_attn.cute", stand_in.varlen, ()),
    "flash-attn 3": ((9, 0), "flash_attn_interface", stand_in.with_cache, ("page_table",)),
    "fa3-fwd": ((9, 0), "fa3_fwd_interface", stand_in.with_cache, ("page_table",)),
    "flash-attn 2": (
        (8, 0), "flash_attn.flash_attn_interface", stand_in.with_cache, ("block_table",)
    ),
}  # fmt: skip


@pytest.fixture
def install(monkeypatch):
    """Return a function that puts a stand-in in place of a library, for CPU tensors."""

    def put(name="flash-attn 3", **options):
        capability, module, make, arguments = INTERFACES[name]
        stands = make(module, *arguments, **options)
        monkeypatch.setitem(sys.modules, module, stands)
        if "." in module:
            package = stand_in._module(module.partition(".")[0])
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="stand-in")
        )
        monkeypatch.setattr(chains, "LEAST_ROWS", 8)
        here = replace(
            flash_attn.BACKEND,
            devices=("cpu",),
            why_not=lambda device: flash_attn.BACKEND.why_not(None),
        )
        others = {name: select.BACKENDS[name] for name in ("cpu", "reference")}
        monkeypatch.setattr(select, "BACKENDS", {"flash_attn": here} | others)
        select._chosen.cache_clear()
        return stands

    yield put
    select._chosen.cache_clear()


def problem(rows=12, lengths=(40, 7, 0), **options):
    return make_problem(lengths, rows, dtype=torch.bfloat16, q_heads=4, kv_heads=2, **options)


def attend(p, paged=False, *, in_cache=False, mask=False, **options):
    keys = (None, None) if in_cache else (p.k_tree, p.v_tree)
    return specattn.hybrid_tree_attention(
        p.q,
        cache_seqlens=p.cache_seqlens,
        k_tree=keys[0],
        v_tree=keys[1],
        tree_mask=p.tree_mask if mask else None,
        **p.cache(paged),
        **options,
    )


def assert_right(p, state, **options):
    exact, rough, single = (
        expected(p.to(dtype), **options) for dtype in (torch.float64, torch.bfloat16, torch.float32)
    )
    assert_accurate(state[0], exact[0], rough[0], atol=1e-6)
    assert_accurate(state[1], exact[1], single[1], atol=2e-6)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", INTERFACES)
@pytest.mark.parametrize("in_cache", [False, True])
def test_a_chain_is_theirs(install, name, in_cache):
    stands = install(name)
    p = problem(parents="chain", tree_in_cache=in_cache)
    assert_right(p, attend(p, in_cache=in_cache))
    assert [causal for _, causal in stands.calls] == ([True] if in_cache else [False, True])
    attend(p, in_cache=in_cache)
    assert len(stands.calls) == (2 if in_cache else 4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_masked_tree_is_ours(install, softcap):
    stands, p = install(), problem()
    assert_right(p, attend(p, mask=True, softcap=softcap), softcap=softcap)
    assert stands.calls == [(p.k_cache.shape, False)]


@pytest.mark.filterwarnings("error")
def test_where_nothing_is_seen_flash_attn_2_says_inf(install):
    install("flash-attn 2", empty=torch.inf)
    p = problem(parents="chain")
    assert_right(p, attend(p))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "page_size", "served"),
    [("flash-attn 3", 16, True), ("flash-attn 2", 256, True), ("flash-attn 2", 16, False),
     ("fa3-fwd", 256, False)],
)  # fmt: skip
def test_pages_that_a_library_takes(install, name, page_size, served):
    stands = install(name)
    p = problem(parents="chain", page_size=page_size)
    assert_right(p, attend(p, True))
    assert bool(stands.calls) == served


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"window": 9}, "windows"), ({"sinks": torch.zeros(4)}, "sinks")],
    ids=["window", "sinks"],
)
def test_what_they_lack_is_ours(install, options, reason):
    stands, p = install(), problem(parents="chain")
    attend(p, **options)
    assert not stands.calls
    with specattn.use_backend("flash_attn"), pytest.raises(RuntimeError, match=reason):
        attend(p, **options)


def test_few_rows_are_theirs_only_where_they_are_forced(install):
    stands, p = install(), problem(rows=4, parents="chain")
    attend(p)
    assert not stands.calls
    with specattn.use_backend("flash_attn"):
        assert_right(p, attend(p))
    assert stands.calls


@pytest.mark.parametrize("wrong", [{"shift": 1}, {"empty": 0.0}], ids=["diagonal", "lse"])
def test_what_computes_otherwise_is_left_alone_and_said_once(install, wrong):
    stands, p = install(**wrong), problem(parents="chain")
    with pytest.warns(UserWarning, match="flash-attn 3 computes something else than our kernels"):
        assert_right(p, attend(p))
    asked = len(stands.calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_right(p, attend(p))
    assert len(stands.calls) == asked


def test_what_raises_is_left_alone_and_said_once(install):
    stands, p = install(), problem(parents="chain")
    stands.flash_attn_with_kvcache = lambda q, k, v: None
    with pytest.warns(UserWarning, match=r"flash-attn 3 raises TypeError: .*left to our kernels"):
        assert_right(p, attend(p))


def test_nothing_is_checked_while_a_graph_is_captured(install, monkeypatch):
    stands, p = install(), problem(parents="chain")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attend(p)
    assert not stands.calls
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    attend(p)
    asked = len(stands.calls)
    assert asked
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    attend(p)
    assert len(stands.calls) == 2 * asked


def test_the_best_for_a_gpu_is_taken(monkeypatch):
    monkeypatch.setattr(libraries, "_is_there", lambda module: True)
    capabilities = ((8, 0), (9, 0), (10, 0), (12, 0), (7, 5))
    names = [x and x.name for x in map(libraries.best, capabilities)]
    assert names == ["flash-attn 2", "flash-attn 3", "flash-attn-4", "flash-attn 2", None]


def test_the_reason_is_said_where_none_is_installed(monkeypatch):
    monkeypatch.setattr(libraries, "_is_there", lambda module: False)
    assert specattn.backends()["flash_attn"] == (
        "none of flash-attn, fa3-fwd and flash-attn-4 is installed"
    )


@pytest.mark.parametrize(("fastest", "rows"), [("flash_attn", 4), ("triton", 12)])
def test_what_was_measured_decides(install, monkeypatch, fastest, rows):
    monkeypatch.setattr(winners, "winner", lambda gpu, shape: fastest)
    stands, p = install(), problem(rows=rows, parents="chain")
    attend(p)
    assert bool(stands.calls) == (fastest == "flash_attn")

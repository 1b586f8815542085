"""Prompts read by FlashAttention: a stand-in computes what its arguments say, on a CPU."""

import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch

from specattn import flash_attention, gpu_record
from specattn.attention_plans import prompts_by
from specattn.decoding.engine.target import Target
from specattn.decoding.passes import cached_model, prompts
from specattn.decoding.passes.prompts import Prompts
from tests.decoding.models import prompts as texts
from tests.decoding.models import tiny_model

LENGTHS, CHUNK = [5, 21, 34], 8


def dense(q, k, v, scale, left=None, softcap=0.0, behind=True):
    """Return attention of rows [B, T, Hq, D], of which the last is at the last key."""
    group, (rows, keys) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bnhd->bhtn", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(rows)[:, None] + (keys - rows if behind else 0)
    key = torch.arange(keys)
    seen = (key <= at) & (key >= (at - left if left is not None else 0))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhtn,bnhd->bthd", weights, v).to(q.dtype)


class Library(ModuleType):
    """Counts its calls."""

    def __init__(self):
        super().__init__("stand_in")
        self.calls = 0


class Flash2(Library):
    def flash_attn_func(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert causal
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        self.calls += 1
        left = None if window_size[0] < 0 else window_size[0]
        return dense(q, k, v, softmax_scale, left, softcap)


class Flash3(Library):
    def flash_attn_func(
        self, q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    ):  # fmt: skip
        assert causal
        self.calls += 1
        left = None if window_size[0] < 0 else window_size[0]
        return dense(q, k, v, softmax_scale, left, softcap)


class Flash4(Library):
    def flash_attn_func(
        self, q, k, v, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    ):  # fmt: skip
        assert causal
        self.calls += 1
        return dense(q, k, v, softmax_scale, window_size[0], softcap), None


def read(model, found, monkeypatch, lengths=LENGTHS, compile="off"):
    """Return features and cache of prompts that a target has read by `found`, or by us."""
    monkeypatch.setattr(cached_model, "prompts_of", lambda *_: found)
    target, features = Target(model, len(lengths), 48, compile), []
    with torch.no_grad():
        target.prefill(
            texts(lengths), CHUNK, on_features=lambda _, parts: features.append(torch.cat([*parts]))
        )
    rows = [target.cache.storage[:, :, n, :length] for n, length in enumerate(lengths)]
    return features, rows


def assert_alike(found, expected):
    for kind, other in zip(found, expected, strict=True):
        for one, own in zip(kind, other, strict=True):
            torch.testing.assert_close(one, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [LENGTHS, [20, 20]], ids=["ragged", "alike"])
@pytest.mark.parametrize("library", [Flash2, Flash3, Flash4])
@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "gemma2"])
def test_a_prompt_is_read_as_by_our_kernels(family, library, lengths, monkeypatch):
    """Chunk by chunk, with windows and softcaps, whatever ends first."""
    model, flash = tiny_model(family, peak=1.0), library()
    found = read(model, Prompts("flash", flash), monkeypatch, lengths)
    assert flash.calls > model.config.num_hidden_layers
    assert_alike(found, read(model, None, monkeypatch, lengths))


def test_a_model_computed_from_its_parts_reads_prompts_so_too(monkeypatch):
    model, flash = tiny_model("llama", peak=1.0), Flash2()
    found = read(model, Prompts("flash", flash), monkeypatch, compile="auto")
    assert flash.calls > model.config.num_hidden_layers
    assert_alike(found, read(model, None, monkeypatch))


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_what_it_has_not_is_left_to_our_kernels(family, monkeypatch):
    """Sinks are not its, nor latents."""
    model, flash = tiny_model(family, peak=1.0), Flash2()
    found = read(model, Prompts("flash", flash), monkeypatch)
    assert_alike(found, read(model, None, monkeypatch))
    assert flash.calls == 0


class FromTheTop(Flash2):
    """The first row sees the first key, as before FlashAttention 2.1."""

    def flash_attn_func(self, q, k, v, **how):
        return dense(q, k, v, how["softmax_scale"], behind=False)


class NoWindow(Flash2):
    """A build without windows."""

    def flash_attn_func(self, q, k, v, *, softmax_scale, causal, window_size=None):
        return dense(q, k, v, softmax_scale)


class Unbuilt(Flash2):
    """A library that was not built for this GPU."""

    def flash_attn_func(self, *given, **how):
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("family", "library", "message"),
    [
        ("llama", FromTheTop, "differs by"),
        ("qwen3-sliding", NoWindow, "window 7.*differs by"),
        ("llama", Unbuilt, "RuntimeError: no kernel image"),
    ],
)
def test_one_that_differs_or_fails_is_refused_once_and_our_kernels_read(
    family, library, message, monkeypatch
):
    model, flash = tiny_model(family, peak=1.0), Prompts("flash", library())
    expected = read(model, None, monkeypatch)
    with pytest.warns(UserWarning, match=f"flash of .*{message}.*our own kernels"):
        assert_alike(read(model, flash, monkeypatch), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_alike(read(model, flash, monkeypatch), expected)


@pytest.mark.parametrize(
    ("arch", "processors", "gluon", "among", "expected"),
    [
        ("sm_80", 108, False, ("flash-attn 2",), "flash-attn 2"),
        ("sm_90", 132, False, ("flash-attn 2", "flash-attn 3"), "flash-attn 3"),
        ("sm_90", 132, True, ("flash-attn 2", "flash-attn 3", "flash-attn 4"), None),
        ("sm_100", 148, False, ("flash-attn 2", "flash-attn 4"), "flash-attn 4"),
        ("sm_100", 148, False, ("flash-attn 2",), None),
        ("sm_80", 108, False, (), None),
    ],
)
def test_the_model_of_times_says_who_is_faster(
    arch, processors, gluon, among, expected, monkeypatch
):
    monkeypatch.setattr(gpu_record, "has_passed", lambda *_: gluon)
    monkeypatch.setattr(gpu_record, "triton_version", lambda: "3.9")
    assert prompts_by(arch, processors, (32, 8), 128, among) == expected


def test_what_is_installed_decides_on_a_gpu_alone(monkeypatch):
    libraries = {"flash-attn 2": Flash2()}
    monkeypatch.setattr(flash_attention, "loaded", lambda name: libraries.get(name, "is missing"))
    card = SimpleNamespace(major=8, minor=0, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    prompts.prompts_of.cache_clear()
    gpu, cpu, heads = torch.device("cuda", 0), torch.device("cpu"), (32, 8)
    found = prompts.prompts_of(gpu, torch.bfloat16, heads, 128)
    assert (found.name, found.library) == ("flash-attn 2", libraries["flash-attn 2"])
    assert prompts.prompts_of(gpu, torch.float32, heads, 128) is None
    assert prompts.prompts_of(cpu, torch.bfloat16, heads, 128) is None
    prompts.prompts_of.cache_clear()

"""A layer's attention over vLLM's cache, against float64, and against vLLM's own."""

import pytest
import torch

pytest.importorskip("vllm", reason="run by `make test-vllm`")
from specattn.reference._eight_bits import dequantised, dynamic_scale, quantised
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from specattn.integrations.vllm import backend
from specattn.integrations.vllm.attention import EIGHT_BITS, Batch, SpecattnAttention
from specattn.integrations.vllm.backend import SpecattnBackend as CPU_BACKEND
from specattn.integrations.vllm.cuda import SpecattnCudaBackend as CUDA_BACKEND
from specattn.integrations.vllm.draft_pass import DraftPass
from tests.integrations.vllm.engine import TINY

HQ, HK, D, BLOCK, PAGES = 4, 2, 32, 32, 24
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 20},
    "softcap": {"logits_soft_cap": 3.0},
    "sinks": {"sinks": True},
}
# Rows of this step, and tokens that were in the cache before it.
MIXTURE = {"prompt": (70, 0), "part": (33, 64), "decoding": (1, 95), "verified": (5, 31)}


@pytest.fixture(scope="module", autouse=True)
def config():
    """Let layers be made outside of an engine."""
    model = ModelConfig(model=str(TINY), skip_tokenizer_init=True)
    with set_current_vllm_config(VllmConfig(model_config=model)):
        yield


def layer_of(kind=SpecattnAttention, sliding_window=None, sinks=False, stored="auto", **options):
    if sinks:
        options["sinks"] = torch.linspace(-2, 2, HQ)
    return kind(HQ, D, D**-0.5, HK, None, sliding_window, stored, **options)


class Scales:
    """A layer of vLLM's, of which only scales are read: of K for all heads, of V head by head."""

    _k_scale, _v_scale = torch.tensor(0.5), torch.tensor([0.25, 2.0])
    _k_scale_float = _v_scale_float = 1.0


def content_of(stored):
    """Return the bytes of a token and head, as vLLM asks a backend for them."""
    mode = get_kv_quant_mode(stored)
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HK, head_size=D, dtype=torch.uint8, kv_quant_mode=mode
    )
    found = {b.customize_spec(spec).state_content_size_bytes for b in (CPU_BACKEND, CUDA_BACKEND)}
    assert len(found) == 1
    return found.pop()


def numbers_of(text, stored):
    """Return what keys and values, [2, tokens, Hk, D], are in a cache of 8 bits."""
    kind = EIGHT_BITS[stored]
    scale = torch.stack([x.expand(HK) for x in (Scales._k_scale, Scales._v_scale)])[:, None]
    if stored.endswith("per_token_head"):
        scale = dynamic_scale(text, kind)
    return dequantised(quantised(text, scale, kind), scale, torch.float64)


class Step:
    """Requests of all kinds in one step, in a cache whose pages lie anywhere."""

    def __init__(self, dtype, kinds=tuple(MIXTURE), stored="auto"):
        rows, before = zip(*(MIXTURE[kind] for kind in kinds), strict=True)
        self.lengths = [n + m for n, m in zip(rows, before, strict=True)]
        self.texts = [torch.randn(2, n, HK, D).to(dtype) for n in self.lengths]
        self.q = torch.randn(sum(rows), HQ, D).to(dtype)
        self.rows, self.before = rows, before
        self.cu = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
        width = max(-(-n // BLOCK) for n in self.lengths)
        self.table = torch.randperm(PAGES)[: len(rows) * width].view(len(rows), width).int()
        self.cache = torch.full((PAGES, HK, BLOCK, 2 * D), torch.nan, dtype=dtype)
        self.read = [text.double() for text in self.texts]
        if stored != "auto":  # 255 is a NaN of both floats, and as a scale
            self.cache = torch.full((PAGES, HK, BLOCK, content_of(stored)), 255, dtype=torch.uint8)
            self.read = [numbers_of(text, stored) for text in self.texts]

    def slots(self, request, begin, end):
        at = torch.arange(begin, end)
        return self.table[request, at // BLOCK].long() * BLOCK + at % BLOCK

    def write(self, layer, step_only):
        """Write what was there before, or what this step brings, through the layer."""
        for i, text in enumerate(self.texts):
            begin, end = (self.before[i], self.lengths[i]) if step_only else (0, self.before[i])
            if begin < end:
                new = text[:, begin:end]
                layer.do_kv_cache_update(Scales, *new, self.cache, self.slots(i, begin, end))

    def batch(self):
        return Batch(
            tokens=len(self.q),
            max_seqlen_q=max(self.rows),
            cu_seqlens_q=self.cu,
            cache_seqlens=torch.tensor(self.before, dtype=torch.int32),
            block_table=self.table,
        )

    def run(self, layer):
        for step_only in (False, True):
            self.write(layer, step_only)
        padded = torch.cat([self.q, self.q.new_full((3, HQ, D), torch.nan)])
        out = torch.full_like(padded, 7.0)
        layer.forward(Scales, padded, None, None, self.cache, self.batch(), out)
        assert bool((out[len(self.q) :] == 7.0).all()), "rows of padding are nobody's"
        return out[: len(self.q)]

    def exact(self, sliding_window=None, logits_soft_cap=None, sinks=False):
        """Return what the rows attend to, in float64, request by request."""
        found = []
        for i, text in enumerate(self.read):
            k, v = (one.repeat_interleave(HQ // HK, 1) for one in text)
            q = self.q[self.cu[i] : self.cu[i + 1]].double()
            logits = torch.einsum("qhd,khd->hqk", q, k) * D**-0.5
            if logits_soft_cap:
                logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
            at = torch.arange(self.before[i], self.lengths[i])[:, None]
            keys = torch.arange(text.shape[1])
            hidden = keys > at
            if sliding_window:
                hidden |= keys <= at - sliding_window
            logits = logits.masked_fill(hidden, -torch.inf)
            if sinks:
                sink = torch.linspace(-2, 2, HQ).double()[:, None, None]
                logits = torch.cat([logits, sink.expand(-1, len(q), 1)], -1)
                v = torch.cat([v, torch.zeros_like(v[:1])])
            found.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), v))
        return torch.cat(found)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_a_mixture_in_one_batch(dtype, options):
    step = Step(dtype)
    found = step.run(layer_of(**options))
    assert (found.double() - step.exact(**options)).abs().max() < ERRORS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", EIGHT_BITS)
def test_a_mixture_over_a_cache_of_8_bits(stored, dtype):
    step = Step(dtype, stored=stored)
    exact = step.exact()
    assert (step.run(layer_of(stored=stored)).double() - exact).abs().max() < ERRORS[dtype]
    window = {"sliding_window": 20}
    found = step.run(layer_of(stored=stored, **window))
    assert (found.double() - step.exact(**window)).abs().max() < ERRORS[dtype]


@pytest.mark.parametrize("stored", EIGHT_BITS)
def test_a_draft_reads_selected_tokens_of_a_cache_of_8_bits(stored):
    """Of all tokens that are cached, by both ways that a layer of a draft attends."""
    step = Step(torch.float32, ("decoding", "verified"), stored)
    selecting, windowed = layer_of(stored=stored), layer_of(stored=stored, sliding_window=400)
    step.write(selecting, step_only=False)
    positions = torch.arange(max(step.before), dtype=torch.int32).expand(2, -1).contiguous()
    prefix = torch.tensor(step.before, dtype=torch.int32)
    draft = DraftPass({selecting: positions}, prefix, prefix, step.table, steps=1)
    rows = step.cu[:-1].long()  # the first token of each request's new ones
    q, new = step.q[rows], [t[:, n] for t, n in zip(step.texts, step.before, strict=True)]
    k, v = torch.stack(new, 1)
    step.read = [
        torch.cat([read[:, :n], one.double()[:, None]], 1)
        for read, n, one in zip(step.read, step.before, new, strict=True)
    ]
    exact = step.exact()[rows]
    for layer in (selecting, windowed):
        out = torch.full_like(q, torch.nan)
        draft.attend(layer, q, k, v, layer._cache(Scales, step.cache), out)
        assert (out.double() - exact).abs().max() < ERRORS[torch.float32]


@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks", *EIGHT_BITS])
def test_scores_are_collected_without_changing_a_bit(kind):
    options = OPTIONS.get(kind, {"stored": kind})
    plain, collected = layer_of(**options), layer_of(**options)
    step = Step(torch.float32, ("decoding", "verified", "part"), options.get("stored", "auto"))
    expected = step.run(plain)

    class Selections:
        wants = staticmethod(lambda batch: True)

        def attend(self, layer, q, cache, batch, out):
            from specattn.integrations.vllm.attention import verify

            self.scores = q.new_full((batch.requests, PAGES * BLOCK), torch.nan)
            self.scores = self.scores[:, : batch.block_table.shape[1] * BLOCK]
            verify(layer, q, cache, batch, out, (0, -1), self.scores)

    collected.selections = Selections()
    assert torch.equal(step.run(collected), expected)
    for i, before in enumerate(step.before):
        row = collected.selections.scores[i]
        assert not row[:before].isnan().any()
        assert row[:before].isfinite().any()


def test_windows_mean_what_vllm_means_by_them():
    """Twenty tokens, the query's own included: what vLLM's kernel says for one decoded token."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, _get_attn_isa

    step = Step(torch.float32, ("decoding",))
    ours = step.run(layer_of(sliding_window=20))
    stock = layer_of(CPUAttentionBackendImpl, sliding_window=20)
    isa = _get_attn_isa(torch.float32, BLOCK, D)
    cache = torch.zeros_like(step.cache)
    k_cache, v_cache = cache.view(PAGES, HK, 2 * BLOCK, D).chunk(2, dim=2)
    (length,) = step.lengths
    ops.cpu_attn_reshape_and_cache(
        *step.texts[0], k_cache, v_cache, step.slots(0, 0, length), isa, 1.0, 1.0, "auto"
    )
    lengths = torch.tensor([length], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=HQ, num_kv_heads=HK, head_dim=D, seq_lens=lengths,
        dtype=torch.float32, query_start_loc=step.cu, causal=True, sliding_window_size=20,
        isa=isa, enable_kv_split=True, dynamic_causal=None, kv_cache_dtype="auto",
    )  # fmt: skip
    metadata = CPUAttentionMetadata(1, 1, step.cu, length, lengths, step.table, None, schedule)

    out = torch.empty_like(step.q)
    stock.forward(Scales, step.q, None, None, cache, metadata, out)
    assert (out - ours).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"kv_cache_dtype": "nvfp4"}, "nvfp4"),
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"head_size": 512}, "512"),
    ],
)
def test_what_keeps_vllms_own_attention(refused, named):
    usual = {"head_size": D, "alibi_slopes": None, "kv_cache_dtype": "auto", "attn_type": "decoder"}
    assert backend.why_not(**usual) is None
    assert named in backend.why_not(**usual | refused)


def test_a_layer_that_is_refused_gets_vllms_own():
    made = backend.SpecattnBackend.get_impl_cls()
    assert type(made(HQ, D, 1.0, HK, None, None, "auto")) is SpecattnAttention
    assert type(made(HQ, 512, 1.0, HK, None, None, "auto")) is CPUAttentionBackendImpl
    assert type(made(HQ, 512, 1.0, HK, None, None, "fp8")) is CPUAttentionBackendImpl


@pytest.mark.parametrize(
    ("stored", "options", "named"),
    [
        ("int8_per_token_head", {"head_size": 512}, "int8_per_token_head, got heads of 512"),
        ("int4_per_token_head", {}, "got a KV cache of int4_per_token_head"),
    ],
)
def test_rows_with_scales_are_not_left_to_vllms_own(stored, options, named):
    made = backend.SpecattnBackend.get_impl_cls()
    with pytest.raises(NotImplementedError, match=named):
        made(HQ, options.get("head_size", D), 1.0, HK, None, None, stored)


REFUSED_ON_A_GPU = {
    "kv_cache_dtype": ("int4_per_token_head", "kv_cache_dtype"),
    "use_mla": (True, "MLA"),
    "attn_type": ("encoder_only", "encoder_only"),
    "use_non_causal": (True, "non-causal"),
    "head_size": (512, "head_size"),
}


def test_what_a_gpu_serves():
    """Asked as vLLM asks; no GPU is needed for the answer."""
    usual = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
        "use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": None, "attn_type": "decoder",
        "has_sliding_window": True,
    }  # fmt: skip
    for served in ("auto", *EIGHT_BITS):
        assert CUDA_BACKEND.validate_configuration(**usual | {"kv_cache_dtype": served}) == []
    for name, (value, reason) in REFUSED_ON_A_GPU.items():
        (found,) = CUDA_BACKEND.validate_configuration(**usual | {name: value})
        assert reason in found
    assert CUDA_BACKEND.get_impl_cls() is SpecattnAttention
    assert CUDA_BACKEND.get_builder_cls()(None, [], None, None).device is None

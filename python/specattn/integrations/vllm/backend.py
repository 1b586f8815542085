"""specattn's attention as a vLLM backend for CPUs, and the layers that keep vLLM's own."""

from __future__ import annotations

from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import (
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from .attention import (
    EIGHT_BITS,
    SpecattnAttention,
    batch_of,
    scales_rows,
    serves_head_size,
    with_scales,
)

_logger = init_logger("vllm.specattn")


class SpecattnBackend(CPUAttentionBackend):
    """vLLM's backend for CPUs with our kernels, layer by layer where they apply.

    The name stays CPU_ATTN, since vLLM looks backends up by it and a CPU has no other.
    """

    supported_kv_cache_dtypes = ["auto", *EIGHT_BITS]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Give rows with scales of their own the room for them."""
        return with_scales(spec)

    @staticmethod
    def get_impl_cls():
        """Return what makes a layer's attention: ours, or vLLM's own where ours cannot be."""
        return _attention_of_layer

    @staticmethod
    def get_builder_cls():
        """Return the builder of what all layers of a step share."""
        return SpecattnMetadataBuilder


def why_not(
    head_size: int, alibi_slopes: object, kv_cache_dtype: str, attn_type: str
) -> str | None:
    """Return why a layer keeps vLLM's own attention, None where ours serves it."""
    if attn_type != AttentionType.DECODER:
        return f"{attn_type} attention"
    if is_quantized_kv_cache(kv_cache_dtype) and kv_cache_dtype not in EIGHT_BITS:
        return f"a KV cache of {kv_cache_dtype}"
    if alibi_slopes is not None:
        return "ALiBi"
    if not serves_head_size(head_size):
        return f"heads of {head_size}"
    return None


def _attention_of_layer(
    num_heads,
    head_size,
    scale,
    num_kv_heads,
    alibi_slopes,
    sliding_window,
    kv_cache_dtype,
    logits_soft_cap=None,
    attn_type=AttentionType.DECODER,
    kv_sharing_target_layer_name=None,
    **others,
):
    """Return a layer's attention; the arguments are those of vLLM's `AttentionImpl`."""
    reason = why_not(head_size, alibi_slopes, kv_cache_dtype, attn_type)
    if reason and scales_rows(kv_cache_dtype):  # vLLM's own would read scales as elements
        raise NotImplementedError(
            "specattn: expected layers that it serves, since vLLM's attention for CPUs has no KV "
            f"cache of {kv_cache_dtype}, got {reason}"
        )
    if reason:
        _logger.warning_once("specattn does not serve %s: those layers keep CPU_ATTN", reason)
    made = CPUAttentionBackendImpl if reason else SpecattnAttention
    return made(
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap,
        attn_type,
        kv_sharing_target_layer_name,
        **others,
    )


class SpecattnMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds our `Batch`, or vLLM's own metadata for a group of layers that keep its attention."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        served = {isinstance(layer.impl, SpecattnAttention) for layer in layers}
        if len(served) > 1:
            raise NotImplementedError(
                "specattn: expected it to serve all layers of a KV cache group or none, got "
                f"both among {', '.join(layer_names)}; unset SPECATTN_VLLM for this model"
            )
        self.serves = served == {True}
        given = kv_cache_spec, layer_names, vllm_config, device
        if self.serves:  # vLLM's own refuses caches of 8 bits without AVX-512
            AttentionMetadataBuilder.__init__(self, *given)
        else:
            super().__init__(*given)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ):
        """Return the metadata of a step for every layer of the group."""
        if not self.serves:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return batch_of(common_attn_metadata)

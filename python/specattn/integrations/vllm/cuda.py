"""specattn's attention as a vLLM backend for GPUs, by Triton kernels: not run on a GPU so far."""

from __future__ import annotations

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from .attention import (
    EIGHT_BITS,
    Batch,
    SpecattnAttention,
    batch_of,
    serves_head_size,
    with_scales,
)


class SpecattnCudaBackend(AttentionBackend):
    """What the backend serves; vLLM refuses the rest by name."""

    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *EIGHT_BITS]

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's list of backends that this one is."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        """Return what computes a layer's attention."""
        return SpecattnAttention

    @staticmethod
    def get_builder_cls():
        """Return the builder of what all layers of a step share."""
        return SpecattnCudaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        """Take pages of any size that vLLM uses."""
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Give rows with scales of their own the room for them."""
        return with_scales(spec)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Ask for the layout that `attention.pages` reads."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Say whether there are kernels for it."""
        return serves_head_size(head_size)

    @classmethod
    def supports_sink(cls) -> bool:
        """Serve attention sinks."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Serve sliding windows."""
        return True


class SpecattnCudaMetadataBuilder(AttentionMetadataBuilder[Batch]):
    """Builds our `Batch`; attention stays outside of vLLM's CUDA graphs."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Batch:
        """Return the metadata of a step for every layer."""
        return batch_of(common_attn_metadata)

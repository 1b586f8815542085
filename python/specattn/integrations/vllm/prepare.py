"""What vLLM needs on a CPU before anything drafts in it: set right, or said at the start."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"


def prepare(vllm_config: VllmConfig) -> None:
    """Set right what vLLM's sampler does to drafts; called as a drafter's model is loaded.

    Raises
    ------
    ValueError
        The model has layers that keep a state: beside drafts its texts are wrong on a CPU.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if vllm_config.model_config.is_hybrid:
        raise ValueError(
            "drafts: expected a model without layers that keep a state, whose texts are wrong "
            "beside drafts on a CPU, got a hybrid; leave out --speculative-config"
        )
    if not _expands():
        set_right()
    sample_plainly()


def set_right() -> None:
    """Give vLLM a kernel that repeats each request's temperature, top-k and top-p for its drafts.

    That of vLLM 0.32 for CPUs writes a copy that it drops, so drafts were verified at the
    temperatures that memory happened to hold. It goes in by vLLM's own registry of kernels.
    """
    from vllm.logger import init_logger
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels({_EXPAND: _expand})
    init_logger("vllm.specattn").info(
        "vLLM's rejection sampler read temperatures that were never written; set right"
    )


def sample_plainly() -> None:
    """Let a step in which nothing was drafted sample as vLLM does without a drafter.

    vLLM 0.32 verifies its zero drafts, which takes 0.5 ms of a step on a CPU.
    """
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    verify = RejectionSampler.forward
    if getattr(verify, "__wrapped__", None) is not None:
        return

    @functools.wraps(verify)
    def forward(
        self: Any, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any
    ) -> Any:
        if metadata.max_spec_len:
            return verify(self, metadata, draft_probs, logits, sampling_metadata)
        return self.sampler(logits=logits, sampling_metadata=sampling_metadata)

    RejectionSampler.forward = forward


def _expands() -> bool:
    """Return whether vLLM repeats temperatures: a wrong one is not what memory holds by chance."""
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    given = torch.tensor([0.59375, 0.0]), torch.tensor([2, 3], dtype=torch.int32), 3
    return expand_batch_to_tokens(*given, 0, 1).tolist() == [0.59375, 0.59375, 1.0]


def _expand(
    output: torch.Tensor,
    input: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Write the value of each request as often as it has tokens."""
    values = torch.where(input == replace_from, torch.full_like(input, replace_to), input)
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values.repeat_interleave(counts))

"""Backend of Tri Dao's flash-attn 2, 3 or 4 for the chains of a prefill, where installed.

Written from their interfaces, not run. They take no tree masks and no sinks, so what they compute
is a prefix that every row sees, or a causal chain; a masked tree is our kernels', and states are
merged by their log-sum-exps (LongSpec, arXiv 2502.17421, section 3.3).
"""

from __future__ import annotations

import torch

from ..backend import Backend, Kernel


def _why_not(device: str | None) -> str | None:
    from . import libraries

    if not libraries.installed():
        return "none of flash-attn, fa3-fwd and flash-attn-4 is installed"
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.version.hip:
        return "it is used on NVIDIA's GPUs only"
    capability = torch.cuda.get_device_capability()
    if libraries.best(capability) is None:
        return f"none that is installed serves compute capability {'.'.join(map(str, capability))}"
    return "it serves CUDA tensors only" if device == "cpu" else None


def _find(op: str) -> Kernel | None:
    if op != "hybrid_tree_attention":
        return None
    from . import libraries
    from .chains import Chains

    library = libraries.best(torch.cuda.get_device_capability())
    return library and Chains(library)


BACKEND = Backend(
    name="flash_attn",
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    why_not=_why_not,
    find=_find,
    trims=True,  # it declines every window
)

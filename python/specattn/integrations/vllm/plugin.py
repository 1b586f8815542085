"""vLLM's entry point: registers specattn's attention in place of vLLM's own."""

from __future__ import annotations

import logging
import os

TESTED = ((0, 32), (0, 33))
"""vLLM's versions with which this was tested: from the first up to, not including, the second."""
SWITCH = "SPECATTN_VLLM"
BACKEND = "specattn.integrations.vllm.backend.SpecattnBackend"
CUDA_BACKEND = "specattn.integrations.vllm.cuda.SpecattnCudaBackend"
_logger = logging.getLogger("vllm.specattn")  # below "vllm", whose format and level it then has


def register() -> None:
    """Register our attention with this process of vLLM; a second call changes nothing.

    On a CPU it replaces CPU_ATTN, the only backend that vLLM lets one choose there, and only with
    ``SPECATTN_VLLM=1``. Elsewhere it becomes CUSTOM, which ``--attention-backend CUSTOM`` chooses.
    With a version of vLLM that it was not tested with, vLLM stays as it is; one line says so where
    the variable is set.
    """
    from vllm.platforms import current_platform

    wanted = os.environ.get(SWITCH, "0") not in ("", "0")
    if not wanted and current_platform.is_cpu():
        return
    reason = _why_not(_installed_version())
    if reason is None:
        reason = _replace(current_platform.is_cpu())
    if reason and wanted:
        _logger.warning("specattn: %s; vLLM's own attention stays in place", reason)


def _replace(on_cpu: bool) -> str | None:
    """Put our backend in its place; return why that could not be, None where it was."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not on_cpu:
        register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    elif not _compiled():
        return "its C++ kernels are not built"
    else:
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    return None


def _compiled() -> bool:
    """Return whether there are C++ kernels, and let vLLM's OpenMP threads run them if so.

    vLLM binds each of these to a core; threads of our own would share the first one.
    """
    try:
        from specattn import _cpu
    except ImportError:
        return False
    _cpu.use_openmp(True)
    return True


def _installed_version() -> str:
    from vllm import __version__

    return __version__


def _why_not(version: str) -> str | None:
    """Return why a version of vLLM is left alone, None where it is not."""
    try:
        release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    except ValueError:
        release = ()
    if TESTED[0] <= release < TESTED[1]:
        return None
    first, stop = (".".join(map(str, one)) for one in TESTED)
    return f"tested with vLLM from {first} up to, not including, {stop}; this is {version}"

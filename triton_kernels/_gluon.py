"""What Gluon calls differently in Triton 3.6 and since 3.7."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

_RENAMED = hasattr(tma, "async_load")
load_tensor = tma.async_load if _RENAMED else tma.async_copy_global_to_shared
load_rows = async_copy.async_load if _RENAMED else async_copy.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

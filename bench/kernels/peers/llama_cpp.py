"""llama.cpp's flash attention, through the libraries that `make llama-cpp` compiles; one request.

Queries and outputs are float32, as in its graphs; the cache is float16, its default, or of the
case's own type. Graph, mask and cache are made beforehand.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from ctypes import POINTER, c_bool, c_char, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch
from common.machine import REPOSITORY

from .task import Attention, Peer

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # ggml_type
_ROWS_OF_MASK = 64  # a multiple of them
_SLACK = 1 << 20  # bytes of a context beside its tensors


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class _Plan(ctypes.Structure):
    _fields_ = [
        ("work_size", c_size_t),
        ("work_data", c_void_p),
        ("n_threads", c_int),
        ("threadpool", c_void_p),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("use_ref", c_bool),
    ]


_SIGNATURES = {
    "ggml_init": (c_void_p, [_InitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor_4d": (c_void_p, [c_void_p, c_int, *[c_int64] * 4]),
    "ggml_permute": (c_void_p, [c_void_p, c_void_p, *[c_int] * 4]),
    "ggml_get_data": (c_void_p, [c_void_p]),
    "ggml_flash_attn_ext": (c_void_p, [c_void_p] * 5 + [c_float] * 3),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_graph_plan": (_Plan, [c_void_p, c_int, c_void_p]),
    "ggml_graph_compute": (c_int, [c_void_p, POINTER(_Plan)]),
    "ggml_cpu_init": (None, []),
}


def _folder() -> Path | None:
    """Return where the libraries lie, or None."""
    found = REPOSITORY.glob(".venv-llama-cpp/lib/python*/site-packages/llama_cpp/lib")
    return next((folder for folder in found if (folder / "libggml-cpu.so").exists()), None)


def why_not(device: torch.device) -> str | None:
    """Return why it is no peer on this device, or None."""
    if device.type != "cpu":
        return "its kernel for CPUs runs on a CPU only"
    return None if _folder() else "not compiled here: `make llama-cpp`"


@functools.cache
def _library() -> dict:
    """Return the functions by name."""
    folder = _folder()
    if folder is None:
        raise FileNotFoundError("libggml-cpu.so")
    loaded = [ctypes.CDLL(str(folder / f"libggml-{part}.so")) for part in ("base", "cpu")]
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        library = next(one for one in loaded if hasattr(one, name))
        functions[name] = getattr(library, name)
        functions[name].restype, functions[name].argtypes = result, arguments
    functions["ggml_cpu_init"]()
    return functions


def attention(task: Attention) -> dict[str, Peer]:
    """Return its kernel over a cache of float16, and over one of the case's own type."""
    if task.prefix is None or len(task.q) > 1:
        return {}
    dtypes = {torch.float16: "f16", task.q.dtype: str(task.q.dtype).removeprefix("torch.")}
    return {f"llama.cpp, {name}": _peer(task, dtype) for dtype, name in dtypes.items()}


def _peer(task: Attention, dtype: torch.dtype) -> Peer:
    """Build a graph of one node over a cache of that type."""
    ggml, q = _library(), task.q[0]
    (rows, q_heads, head_dim), (k, v) = q.shape, (x[0] for x in task.keys_and_values())
    length, kv_heads = k.shape[:2]
    held_rows = -(-rows // _ROWS_OF_MASK) * _ROWS_OF_MASK
    sizes = 2 * k.numel() * dtype.itemsize, 2 * held_rows * length, 8 * q.numel()
    context = ggml["ggml_init"](_InitParams(sum(sizes) + _SLACK, None, False))

    def tensor(values: torch.Tensor) -> c_void_p:
        """Copy a tensor of up to four dimensions, the first of ggml's being the last of torch's."""
        values = values.contiguous()
        size = [*reversed(values.shape), *[1] * (4 - values.dim())]
        made = ggml["ggml_new_tensor_4d"](context, _TYPES[values.dtype], *size)
        ctypes.memmove(ggml["ggml_get_data"](made), values.data_ptr(), values.nbytes)
        return made

    def by_head(values: torch.Tensor) -> c_void_p:
        return ggml["ggml_permute"](context, tensor(values), 0, 2, 1, 3)

    mask = None
    if (visible := task.full_mask()) is not None:
        mask = torch.zeros(held_rows, length, dtype=torch.float16)
        mask[:rows].masked_fill_(~visible, -torch.inf)
    node = ggml["ggml_flash_attn_ext"](
        context,
        by_head(q.float()),
        by_head(k.to(dtype)),
        by_head(v.to(dtype)),
        None if mask is None else tensor(mask),
        head_dim**-0.5,
        0.0,
        0.0,
    )
    graph = ggml["ggml_new_graph"](context)
    ggml["ggml_build_forward_expand"](graph, node)
    plan = ggml["ggml_graph_plan"](graph, torch.get_num_threads(), None)
    work = torch.empty(plan.work_size, dtype=torch.uint8)
    plan.work_data = work.data_ptr()
    place = (c_char * (4 * q.numel())).from_address(ggml["ggml_get_data"](node))
    out = torch.frombuffer(place, dtype=torch.float32).view(1, rows, q_heads, head_dim)

    def attend() -> dict[str, torch.Tensor]:
        if ggml["ggml_graph_compute"](graph, ctypes.byref(plan)):
            raise RuntimeError("ggml_graph_compute failed")
        return {"out": out}

    attend.work = work  # lives as long as the plan that points to it
    weakref.finalize(attend, ggml["ggml_free"], context)
    return attend

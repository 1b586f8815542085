"""A GPU whose memory is the host's, and which notes where the host would wait for it."""

from contextlib import contextmanager
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_READS = {
    "tolist", "item", "cpu", "numpy", "nonzero", "equal", "unique", "masked_select",
    "__bool__", "__int__", "__float__", "__index__", "__contains__",
}  # fmt: skip
_CUDA = torch.device("cuda", 0)
SEGMENTS = [
    {"device": device, "segment_pool_id": pool, "total_size": size}
    for device, pool, size in ((0, (0, 0), 1), (0, (0, 1), 20), (0, (0, 2), 300), (1, (0, 3), 4000))
]
"""Of torch's memory: its own on one GPU, of two pools of graphs, and of one on another."""


class _OnGPU(torch.Tensor):
    """A tensor that says that its memory is the GPU's."""

    device = _CUDA
    is_cuda = True


class FakeGPU(TorchFunctionMode):
    """Serves ``device="cuda"`` inside its context; `waits` are the calls that wait for it.

    These are reads of what it has, and copies that are not enqueued between pinned memory and its
    own. Indexing with a list or with bools is either. An event has passed only when the host has
    waited for it, or for something behind it.
    """

    def __init__(self):
        super().__init__()
        self.waits, self._pinned = [], set()
        self._recorded = self._passed = 0  # events
        self.allocator = "native"

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Run a function of torch's where its tensors are."""
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        wanted = [x for x in (*args, kwargs.get("device")) if isinstance(x, (torch.device, str))]
        to_gpu = any(torch.device(x).type == "cuda" for x in wanted if x in ("cuda", _CUDA))
        if to_gpu:
            kwargs.pop("device", None)
            args = tuple("cpu" if x in ("cuda", _CUDA) and x in wanted else x for x in args)
        pinned = kwargs.pop("pin_memory", False)
        on_gpu = any(isinstance(x, _OnGPU) for x in tree_leaves((args, kwargs)))
        self._note(name, args, kwargs, to_gpu, on_gpu)
        if isinstance(function, torch._ops.OpOverload):  # ours, in Python too: they ask the device
            args = tree_map_only(_OnGPU, lambda x: x.as_subclass(torch.Tensor), args)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if pinned:
            self._pinned.add(result.untyped_storage().data_ptr())
        leaves = name == "cpu" or name == "to" and wanted and not to_gpu
        stays = isinstance(args[0], _OnGPU) if name == "copy_" else on_gpu
        if (to_gpu or stays) and not leaves:
            return _wrapped(result)
        return result

    def _note(self, name, args, kwargs, to_gpu, on_gpu):
        uploads = name == "to" and to_gpu and not on_gpu
        if name == "copy_":
            uploads = isinstance(args[0], _OnGPU) != isinstance(args[1], _OnGPU)
        if name == "_foreach_copy_":
            pairs = zip(*args[:2], strict=True)
            uploads = any(isinstance(to, _OnGPU) != isinstance(x, _OnGPU) for to, x in pairs)
        if uploads:
            enqueued = kwargs.get("non_blocking") and any(map(self._is_pinned, args[:2]))
            if not enqueued:
                self._wait(name)
        elif on_gpu and name in _READS:
            self._wait(name)
        elif on_gpu and name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_waits_as_index, index)):
                self._wait(name)
        else:
            lists = name in ("tensor", "as_tensor") and to_gpu and not isinstance(args[0], _OnGPU)
            if lists or name == "new_tensor" and on_gpu:
                self._wait(name)

    def _wait(self, what="device"):
        """Wait until nothing is left to do: what was recorded before has passed."""
        self.waits.append(what)
        self._passed = self._recorded

    def _is_pinned(self, x):
        if not isinstance(x, torch.Tensor) or isinstance(x, _OnGPU):
            return False
        return x.untyped_storage().data_ptr() in self._pinned

    def _snapshot(self, pool=None):
        if self.allocator != "native":
            raise RuntimeError(f"{self.allocator} does not yet support snapshot")
        assert pool is not None, "a look at all of torch's memory takes long"
        return [one for one in SEGMENTS if one["segment_pool_id"] == pool]

    @contextmanager
    def serving(self):
        """Serve; events and streams are this GPU's, too."""
        gpu = self

        class Event:
            def __init__(self, enable_timing=False):
                self.timed, self.number = enable_timing, None

            def record(self, stream=None):
                gpu._recorded += 1
                self.number = gpu._recorded

            def query(self):
                return self.number <= gpu._passed

            def synchronize(self):
                gpu.waits.append("event")
                gpu._passed = max(gpu._passed, self.number)

            def elapsed_time(self, other):
                if not (self.timed and other.timed and self.query() and other.query()):
                    raise RuntimeError("both events must be timed, recorded and completed")
                return float(other.number - self.number)

        with (
            mock.patch.object(torch.cuda, "Event", Event),
            mock.patch.object(torch.cuda, "current_stream", return_value=None),
            mock.patch.object(torch.cuda, "synchronize", side_effect=self._wait),
            mock.patch.object(torch.cuda, "memory_snapshot", self._snapshot),
            mock.patch.object(torch.cuda, "get_allocator_backend", return_value=self.allocator),
            self,
        ):
            yield self


def _waits_as_index(x):
    if isinstance(x, torch.Tensor):
        return x.dtype == torch.bool or not isinstance(x, _OnGPU)
    return isinstance(x, list)


def _wrapped(result):
    if isinstance(result, torch.Tensor):
        return result.as_subclass(_OnGPU)
    if isinstance(result, (tuple, list)):
        parts = [_wrapped(x) for x in result]
        named = hasattr(result, "n_fields")  # torch's own, with names
        return type(result)(parts) if named or type(result) in (tuple, list) else tuple(parts)
    return result

"""`PromptSnapshot`: what it costs to keep a batch's prompts, and that they come back."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList

from specattn.decoding import METHODS, Target
from specattn.decoding.engine.snapshot import PromptSnapshot
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model

COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class Copies(TorchDispatchMode):
    """Notes what would be made on a GPU beside the tensors that a copy is from and to.

    A GPU copies from or to the host in one piece; what is not, goes through a tensor that is.
    """

    def __init__(self, storage):
        super().__init__()
        self.storage, self.beside, self.pieces = storage, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        ours = [x for x in args if isinstance(x, torch.Tensor) and self.is_cache(x)]
        if func in COPIES and ours:
            self.pieces += 1
            whole = all(x.is_contiguous() for x in args if isinstance(x, torch.Tensor))
            same_type = all(x.dtype == self.storage.dtype for x in (*ours, found))
            if not (whole and same_type):
                self.beside.append((func, [tuple(x.shape) for x in ours]))
        return found

    def is_cache(self, x):
        return x.untyped_storage().data_ptr() == self.storage.untyped_storage().data_ptr()


@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}], ids=["as the model", "int8"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_batch_is_kept_on_the_host_without_a_second_copy_on_the_device(family, options):
    model, texts = tiny_model(family), prompts([20, 20, 20])
    target = Target(model, 3, 60, **options)
    keeping = Copies(target.cache.storage)

    class Snapshot(PromptSnapshot):
        def _prefill(self):
            found = super()._prefill()
            with keeping:
                self._keep()
            return found

    snapshot = Snapshot(target, texts)
    restoring = Copies(target.cache.storage)
    with restoring:
        snapshot.restore()
    layers = len(target.cache.storage) * target.cache.storage.shape[1]
    for mode in (keeping, restoring):
        assert mode.beside == []
        assert mode.pieces == layers * 3


@pytest.mark.parametrize("family", ["qwen3", "olmo_hybrid"])
def test_runs_of_requests_that_end_one_by_one_start_from_the_same_prompts(family):
    model, texts = tiny_model(family), prompts([20, 20, 20])
    snapshot = PromptSnapshot(Target(model, 3, 60), texts)
    expected = [greedy_by_transformers(model, x, 12) for x in texts]
    for name in ("suffix", "plain", "suffix"):
        given = {"do_sample": False, "seed": 0}
        new, _ = snapshot.run(METHODS[name](), 12, LogitsProcessorList(), **given)
        assert new == expected
        snapshot._rows[:, :, :, :5] = 7.0  # what other requests may have moved there

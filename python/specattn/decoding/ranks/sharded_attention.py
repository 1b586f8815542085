"""Attention over a cache that is sharded over ranks, in a recording of kernel calls.

What `ContextCache` does in Python, with the same kernels: here memory is fixed, so that only the
exchange between the ranks remains a step in Python.
"""

from __future__ import annotations

from typing import Any

import torch

import specattn._cpu as _cpu
from specattn.blocks import Ops, Store
from specattn.blocks.recorder import Recorder
from specattn.decoding.passes.attention import Pass
from specattn.decoding.passes.runner import Collected, LayerAttention, store_of
from specattn.distributed.context import ContextCache


class ShardedAttention(LayerAttention):
    """How the layers of a recorded pass attend to a `ContextCache`."""

    cache: ContextCache

    def inputs(self, plan: Pass) -> dict[str, torch.Tensor]:
        """Return what changes from pass to pass beside what every pass has."""
        held, places = self.cache.placing(plan.prefix, plan.rows if plan.tree_mask is None else 0)
        return {"held": held, "places": places}

    def in_python(self, plan: Pass) -> bool:
        """Whether full-attention layers must attend in Python."""
        return plan.selector is not None

    def store(self, n: int) -> Store | None:
        """Return where layer n stores its heads: with a window, whole on every rank."""
        if self.windows[n] is None:
            return None
        return store_of(self.cache.whole, self.cache.place(n))

    def attend(
        self,
        ops: Ops,
        n: int,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        inputs: dict[str, torch.Tensor],
        collected: Collected | None,
        **options: Any,
    ) -> torch.Tensor:
        """Return the outputs of layer n.

        One without a window stores new keys and values, attends to those held here, and merges the
        states of all ranks.
        """
        if options["window"] is not None:
            k_cache, v_cache = self.cache.whole.layer(self.cache.place(n))
            whole = (heads[0], k_cache, v_cache, inputs["prefix"], None, None)
            return ops.hybrid_tree_attention(*whole, **options)
        assert isinstance(ops, Recorder)
        cache, (q, k, v) = self.cache, heads
        tree_mask, sinks = options["tree_mask"], options["sinks"]
        if tree_mask is None:
            caches = cache.storage[cache.place(n)]
            ops.kernel(_cpu.write_kv, k, v, *caches, inputs["places"], *[None] * 4)
        else:
            ops.python(lambda: cache.stage(n, k, v))
        if not cache.holds_new:
            rows = q.shape[1]
            tree_mask = torch.zeros(1, rows, -(-rows // 64), dtype=torch.int64)  # they see none
            sinks = None
        buffer = cache.state_buffer(q)
        k_cache, v_cache = cache.layer(n)
        read: Any = {"k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": inputs["held"]}
        read |= {"k_tree": k, "v_tree": v, "tree_mask": tree_mask, "sinks": sinks}
        read |= {name: options[name] for name in ("softmax_scale", "softcap")}
        if collected is None:
            ops.attend("hybrid_tree_attention", q, buffer.own, **read)
        else:
            rows_of, scores = list(collected.rows), collected.scores
            read |= {"collect": "scores", "collect_rows": rows_of, "collected": scores}
            per_head = scores.dim() == 3
            ops.attend("verify_attention", q, buffer.own, per_head=per_head, **read)
        ops.python(lambda: cache.exchange_states(buffer))
        out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), buffer.own[1].clone()
        ops.kernel(_cpu.merge_states, *buffer.all, out, lse)
        return out

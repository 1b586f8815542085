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

    def key(self, plan: Pass) -> int:
        """Return what recordings differ by beside their inputs: where new rows are staged."""
        staged, _ = self.cache.staging(0, plan.rows, plan.tree_mask is None)
        return staged.storage.data_ptr()

    def inputs(self, plan: Pass) -> dict[str, torch.Tensor]:
        """Return what changes from pass to pass beside what every pass has."""
        held, places = self.cache.placing(plan.prefix, plan.rows if plan.tree_mask is None else 0)
        return {"held": held, "places": places}

    def in_python(self, plan: Pass) -> bool:
        """Whether full-attention layers must attend in Python."""
        return plan.selector is not None

    def store(self, n: int, count: int, chain: bool) -> Store | None:
        """Return where layer n stores its heads: with a window, whole on every rank."""
        if self.windows[n] is not None:
            return store_of(self.cache.whole, self.cache.place(n))
        if chain and not self.cache.reads_staged:
            return None
        return store_of(*self.cache.staging(n, count, chain), slot=0)

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
            whole, place = self.cache.whole, self.cache.place(n)
            read = (*whole.layer(place), inputs["prefix"], None, None)
            options |= whole.scales(place)
            return ops.hybrid_tree_attention(heads[0], *read, **options)
        assert isinstance(ops, Recorder)
        cache, (q, k, v) = self.cache, heads
        if options["tree_mask"] is None:
            scales = tuple(cache.scales(n).values()) or (None, None)
            places = inputs["places"], None, None, *scales
            ops.kernel(_cpu.write_kv, k, v, *cache.layer(n), *places)
        buffer = cache.state_buffer(q)
        if cache.reads_staged:
            states = [_like(buffer.own), _like(buffer.own)]
            self._attend_to_held(ops, n, heads, states[0], inputs, collected, options)
            self._attend_to_staged(ops, n, q, states[1], options)
            ops.kernel(_cpu.merge_state, *states[0], *states[1], *buffer.own)
        else:
            self._attend_to_held(ops, n, heads, buffer.own, inputs, collected, options)
        ops.python(lambda: cache.exchange_states(buffer))
        out, lse = _like(buffer.own)
        ops.kernel(_cpu.merge_states, *buffer.all, out, lse)
        return out

    def _attend_to_held(
        self,
        ops: Recorder,
        n: int,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        state: Any,
        inputs: dict[str, torch.Tensor],
        collected: Collected | None,
        options: dict[str, Any],
    ) -> None:
        """Attend to what this rank holds, and to the new rows where they are not read staged."""
        cache, (q, k, v) = self.cache, heads
        k_cache, v_cache = cache.layer(n)
        read: Any = {"k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": inputs["held"]}
        read |= {"k_tree": k, "v_tree": v, **cache.scales(n)}
        read |= {name: options[name] for name in ("softmax_scale", "softcap")}
        if cache.reads_new:
            read |= {name: options[name] for name in ("tree_mask", "sinks")}
        else:
            rows = q.shape[1]
            read["tree_mask"] = torch.zeros(
                1, rows, -(-rows // 64), dtype=torch.int64, device="cpu"
            )  # see none
        if collected is None:
            ops.attend("hybrid_tree_attention", q, state, **read)
            return
        rows_of, scores = list(collected.rows), collected.scores
        read |= {"collect": "scores", "collect_rows": rows_of, "collected": scores}
        ops.attend("verify_attention", q, state, per_head=scores.dim() == 3, **read)

    def _attend_to_staged(
        self, ops: Recorder, n: int, q: torch.Tensor, state: Any, options: dict[str, Any]
    ) -> None:
        """Attend to the new rows as they are stored."""
        count, tree_mask = q.shape[1], options["tree_mask"]
        staged, place = self.cache.staging(n, count, tree_mask is None)
        k, v = (x[:, :count] for x in staged.layer(place))
        read: Any = {name: x[:, :count] for name, x in staged.scales(place).items()}
        read |= {"k_cache": k, "v_cache": v, "tree_mask": tree_mask, "sinks": options["sinks"]}
        read["cache_seqlens"] = torch.zeros(len(q), dtype=torch.int32, device="cpu")
        read |= {name: options[name] for name in ("softmax_scale", "softcap")}
        ops.attend("hybrid_tree_attention", q, state, **read)


def _like(state: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for a state of the same size."""
    out, lse = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in state)
    return out, lse

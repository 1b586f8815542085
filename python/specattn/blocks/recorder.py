"""Records a block as C++ kernel calls over fixed memory, to run them again without Python.

On a CPU what a CUDA graph is on a GPU: what Python does between the calls is paid for once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

import specattn._cpu as _cpu
from specattn.blocks.gated_delta import Convolution, split_mixed
from specattn.blocks.kernels import Kernels, Memory
from specattn.blocks.operands import Projection, Unrecognised, embedding_scale, projection
from specattn.quantised import QuantisedWeight
from specattn.reference.tree_mask import WORD_BITS
from specattn.states import StateRows

_MOST_PARTS = 3  # weights that one product takes


def _read(projection: Projection) -> tuple[Any, torch.Tensor | None]:
    """Return what kernels read of a projection: of codes, them with their scale and zero."""
    weight, bias = projection
    if isinstance(weight, QuantisedWeight):
        weight = weight.codes, weight.scale, weight.zero
    else:
        weight = weight.detach()
    return weight, None if bias is None else bias.detach()


def _alike(projections: Sequence[Projection]) -> Iterator[list[Projection]]:
    """Yield neighbours that one product takes: so many, and all of codes of one kind or none."""
    for _, some in groupby(projections, key=_kind):
        same = list(some)
        for first in range(0, len(same), _MOST_PARTS):
            yield same[first : first + _MOST_PARTS]


def _kind(projection: Projection) -> Any:
    weight = projection.weight
    if not isinstance(weight, QuantisedWeight):
        return None
    return weight.codes.dtype, weight.bits, weight.scale.dtype, weight.scale.shape[1]


class Recorder(Kernels):
    """The operators of blocks as kernel calls: they run now, and in every replay."""

    def __init__(self, memory: Memory):
        super().__init__(memory)
        self._steps: list[Any] = [_cpu.Graph()]
        self._held: list[Any] = []  # what kernels read and write must live as long as they

    def record(self, program: Callable[..., Any], inputs: dict[str, torch.Tensor]) -> Any:
        """Run a program once and keep what it does."""
        return program(self, **inputs)

    def replay(self) -> None:
        """Run everything again, on what its tensors hold now."""
        threads = torch.get_num_threads()
        for step in self._steps:
            if isinstance(step, _cpu.Graph):
                step.replay(threads)
            else:
                step()

    def kernel(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a kernel of `specattn._cpu`, by position."""
        self._held.append(arguments)
        with self._steps[-1]:
            function(*arguments, torch.get_num_threads())

    def python(self, function: Callable[[], Any]) -> None:
        """Run a function now, and in every replay."""
        function()
        self._steps += [function, _cpu.Graph()]

    def step(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        out = function().clone()

        def again() -> None:
            out.copy_(function())

        self._steps += [again, _cpu.Graph()]
        return out

    def embed(self, tokens: torch.Tensor, module: nn.Module) -> torch.Tensor:
        scale, weight = embedding_scale(module), module.weight.detach()  # type: ignore[operator]
        out = self._rows("embedded", tokens, weight.shape[1], weight.dtype)
        self.kernel(_cpu.embed, tokens, weight, out.flatten(0, -2))
        if scale != 1.0:
            self.python(lambda: out.mul_(scale))
        return out

    def beside(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        widths = [first.shape[-1], second.shape[-1]]
        out = self._rows("beside", first[..., 0], sum(widths), first.dtype)
        for x, columns in zip((first, second), out.flatten(0, -2).split(widths, 1), strict=True):
            self._copy(x, columns)
        return out

    def copy(self, x: torch.Tensor, to: torch.Tensor) -> None:
        self._copy(x, to.flatten(0, -2))

    def stack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        size, width = math.prod(parts[0].shape[:-1]), parts[0].shape[-1]
        out = self.memory.rows("stacked", size * len(parts), width, parts[0].dtype)
        out = out.view(size, len(parts), width)
        for number, x in enumerate(parts):
            self._copy(x, out[:, number])
        return out.view(*parts[0].shape[:-1], len(parts), width)

    def linear(
        self,
        x: torch.Tensor,
        *projections: Projection,
        gate: str | None = None,
        activation: str | None = None,
        residual: torch.Tensor | None = None,
        keep: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        sizes = [len(one.weight) for one in projections]
        columns = sizes[0] if gate is not None else sum(sizes)
        out = residual if into is None else into
        if out is None or keep:
            what = "product" if gate is None else "gated"
            out = self._rows(what, x[..., 0], columns, x.dtype, keep)
        rows, to = x.flatten(0, -2), out.flatten(0, -2)
        added = None if residual is None else residual.flatten(0, -2)
        if rows.data_ptr() == to.data_ptr():
            raise ValueError("a product would overwrite what it reads: keep that")
        if activation is not None:
            ((weight, bias),) = map(_read, projections)
            codes = weight if isinstance(weight, tuple) else (weight, None, None)
            of_codes = (*codes[1:], None, None)
            given = (rows, codes[0], bias, None, activation, added, *of_codes)
            self.kernel(_cpu.linear_few_rows, *given, to)
            return out
        done = 0
        for some in _alike(projections):
            if gate is not None and len(some) != len(projections):
                raise Unrecognised("a gate's weights are of codes, and what it gates are not")
            weights, biases = zip(*map(_read, some), strict=True)
            width = columns if gate is not None else sum(len(one.weight) for one in some)
            part = slice(done, done + width)
            summed = None if added is None else added[:, part]
            self.kernel(_cpu.linear_parts, rows, weights, biases, gate, summed, to[:, part])
            done += width
        return out

    def head(self, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        plain = type(module) is nn.Linear
        return self.logits(x, projection(module)) if plain else self.step(lambda: module(x))

    def logits(self, x: torch.Tensor, head: Projection) -> torch.Tensor:
        out = self._rows("logits", x[..., 0], len(head.weight), x.dtype)
        weight, bias = _read(head)
        read, to = x.flatten(0, -2), out.flatten(0, -2)
        self.kernel(_cpu.linear_parts, read, [weight], [bias], None, None, to)
        return out

    def gated_delta(
        self,
        x: torch.Tensor,
        convolution: Convolution,
        g: torch.Tensor,
        beta: torch.Tensor,
        k_heads: int,
        rows: StateRows,
    ) -> torch.Tensor:
        assert rows.room is not None, "what changes a state is not recorded"
        size, v_dim = g.numel(), rows.state.shape[-1]
        mixed = self._rows("convolved", x[..., 0], x.shape[-1], x.dtype)
        kept = rows.conv_state, rows.parents, "silu"
        self.kernel(_cpu.causal_conv_tree, x, *convolution, *kept, None, None, mixed)
        out = self.memory.rows("read from states", size, v_dim, x.dtype).view(*g.shape, v_dim)
        heads = split_mixed(mixed, k_heads, rows.state)
        read = (*heads, g, beta, rows.state, rows.parents, heads[0].shape[-1] ** -0.5, True)
        self.kernel(_cpu.gated_delta_tree, *read, None, None, out, rows.room[1])
        return out

    def hybrid_tree_attention(self, q: torch.Tensor, *read: Any, **options: Any) -> torch.Tensor:
        return self._attend("hybrid_tree_attention", q, read, options)

    def verify_attention(
        self, q: torch.Tensor, *read: Any, scores: torch.Tensor, rows: Sequence[int], **options: Any
    ) -> torch.Tensor:
        options |= {"collect": "scores", "collect_rows": list(rows), "collected": scores}
        options["per_head"] = scores.dim() == 3
        return self._attend("verify_attention", q, read, options)

    def sparse_gather_attention(self, q: torch.Tensor, *read: Any, **options: Any) -> torch.Tensor:
        return self._attend("sparse_gather_attention", q, read, options)

    def children(
        self, logits: torch.Tensor, scores: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, nodes, vocabulary = logits.shape
        width, rows = min(width, vocabulary), batch * nodes
        # A node's children are found as those of a root: what is said beside them means nothing.
        tokens, parents = torch.empty(2, rows, width, dtype=torch.int64, device="cpu")
        found = torch.empty(rows, width, dtype=torch.float32, device="cpu")
        words = width // WORD_BITS + 1
        masks = torch.zeros(rows, width, words, dtype=torch.int64, device="cpu")
        level = (logits.view(rows, 1, vocabulary), scores.reshape(rows, 1), masks[:, :1].clone())
        self.kernel(_cpu.best_children, *level, 0, tokens, found, parents, masks)
        return tokens.view(batch, nodes, width), found.view(batch, nodes, width)

    def best_children(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        masks: torch.Tensor,
        first: int,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        batch = len(logits)
        tokens, parents = torch.empty(2, batch, width, dtype=torch.int64, device="cpu")
        best = torch.empty(batch, width, dtype=torch.float32, device="cpu")
        below = masks.new_empty(batch, width, masks.shape[-1])
        self.kernel(_cpu.best_children, logits, scores, masks, first, tokens, best, parents, below)
        return tokens, best, parents, below

    def expand_best(
        self,
        tokens: torch.Tensor,
        scores: torch.Tensor,
        masks: torch.Tensor,
        first: int,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        chosen, drafted, rows = torch.empty(3, len(tokens), width, dtype=torch.int64, device="cpu")
        best = torch.empty(len(tokens), width, dtype=torch.float32, device="cpu")
        below = masks.new_empty(len(tokens), width, masks.shape[-1])
        candidates = tokens.flatten(1), scores.flatten(1), masks, first
        self.kernel(_cpu.expand_best, *candidates, chosen, drafted, best, rows, below)
        return chosen, drafted, best, rows, below

    def attend(self, name: str, q: torch.Tensor, state: Any, **options: Any) -> None:
        """Record a primitive by its arguments' names, with the state (out, lse) that it writes."""
        out, lse = state
        options |= {"q": q, "out": out, "lse": lse}
        options.setdefault("softmax_scale", q.shape[-1] ** -0.5)
        options.setdefault("softcap", 0.0)
        schema = getattr(torch.ops.specattn, name).default._schema
        arguments = [
            options.pop(argument.name, False if str(argument.type) == "bool" else None)
            for argument in schema.arguments
        ]
        assert not options, f"{name} has no {', '.join(options)}"
        self.kernel(getattr(_cpu, name), *arguments)

    def _attend(self, name: str, q: torch.Tensor, read: Any, options: Any) -> torch.Tensor:
        schema = getattr(torch.ops.specattn, name).default._schema
        names = [argument.name for argument in schema.arguments[1 : 1 + len(read)]]
        options |= dict(zip(names, read, strict=True))
        if (mask := options.get("tree_mask")) is not None and mask.dim() == 2:
            options["tree_mask"] = mask[None]
        size, heads, width = q.shape[:2].numel(), q.shape[2], read[1].shape[-1]
        out = self.memory.rows("attended", size, heads * width, q.dtype)
        lse = self.memory.rows("log-sum-exp", size, heads, torch.float32)
        out, lse = out.view(*q.shape[:-1], width), lse.view(q.shape[:-1])
        self.attend(name, q, (out, lse), **options)
        return out

    def _copy(self, x: torch.Tensor, to: torch.Tensor) -> None:
        """Copy rows: by the kernel that looks them up."""
        self.kernel(_cpu.embed, torch.arange(len(to), device="cpu")[None], x.flatten(0, -2), to)

"""Runs functions of `ops`: directly, recorded as kernel calls, or captured as CUDA graphs.

What is replayed is kept by a key and the shapes of its inputs. Whatever changes from run to run is
copied to where the recording reads it: nothing else may change, which is why lengths decide inside
the kernels. To capture takes as long as many replays, so what was captured for a batch serves
smaller ones, too: its last requests have no text then.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from specattn.blocks.cuda_graphs import Graph, cuda_graphs
from specattn.blocks.ops import TORCH, Ops

Program = Callable[..., Any]
"""``program(ops, **inputs)``: returns tensors, or tuples of them."""

Size = tuple[int, ...]
"""Of a program: how many requests it is for, and rows of each if there may be more."""

_MOST_KEPT = 64
_CAPTURE = 8_000
"""Rows more in passes that take as long as to capture one: some 0.3 s on an H100 (0.15 to 0.6),
where 160 take as long as a plain step, 6 ms."""


class Programs(Protocol):
    """A way to run programs; `in_python`: whether they may have steps in Python (`Ops.step`)."""

    in_python: bool

    def run(
        self,
        key: Hashable,
        program: Program,
        inputs: dict[str, torch.Tensor],
        batch: int | None = None,
    ) -> Any:
        """Return what a program returns; where it is replayed, it holds until the next run.

        `key` says what the program depends on beside the shapes of its inputs. With a `batch`, all
        but so many requests, by which these shapes differ: they are independent, and the first
        dimension of every result. One without text, of zeros, may stand behind them.
        """

    def depth_for(self, key: Hashable, depth: int, rows: Sequence[int], batch: int | None) -> int:
        """Return how deep a draft runs of which `depth` levels are wanted: the rest is cut.

        Drafts as `key` says differ in depth alone, with which the key of each ends: ``(key, n)``;
        `rows` says how many rows of a pass take as long as n levels, n from 0 to the deepest.
        """

    def beside(self) -> Programs:
        """Return the same way to run others, while the results of these still count."""


class Direct:
    """Runs programs by torch's operators."""

    in_python = True

    def run(
        self,
        key: Hashable,
        program: Program,
        inputs: dict[str, torch.Tensor],
        batch: int | None = None,
    ) -> Any:
        """Return what a program returns."""
        return program(TORCH, **inputs)

    def depth_for(self, key: Hashable, depth: int, rows: Sequence[int], batch: int | None) -> int:
        """Return `depth`."""
        return depth

    def beside(self) -> Direct:
        """Return itself: nothing is kept."""
        return self


class Tape(Protocol):
    """Keeps what a program does."""

    def record(self, program: Program, inputs: dict[str, torch.Tensor]) -> Any:
        """Run a program on inputs that stay where they are; return what it returns."""

    def replay(self) -> None:
        """Do it again, on what the inputs hold now; results lie where they did."""


class _Kept(NamedTuple):
    tape: Tape
    inputs: dict[str, torch.Tensor]
    results: Any


class Replayed:
    """Runs programs once and replays them from then on; keeps those used last.

    ``tapes()`` returns what makes new tapes that share their memory.
    """

    def __init__(self, tapes: Callable[[], Callable[[], Tape]], *, in_python: bool):
        self._tapes, self.in_python = tapes, in_python
        self._tape: Callable[[], Tape]
        self._inputs: dict[tuple[Any, ...], torch.Tensor] = {}
        self._kept: dict[tuple[Any, ...], _Kept] = {}
        self._sizes = defaultdict[Hashable, dict[Size, tuple[Any, ...]]](dict)
        self._padding = defaultdict[tuple[Hashable, Size], int](int)  # rows so far
        self._most = _MOST_KEPT

    def __len__(self) -> int:
        """Return how many programs are kept."""
        return len(self._kept)

    def run(
        self,
        key: Hashable,
        program: Program,
        inputs: dict[str, torch.Tensor],
        batch: int | None = None,
    ) -> Any:
        """Return what a program returns, until the next run."""
        if batch is None or self.in_python:
            return self.run_as(None, key, program, inputs)
        size = self.fitting(key, (batch,), (batch,))
        found = self.run_as(size, key, program, inputs)
        return found if size == (batch,) else _first(found, batch)

    def run_as(
        self,
        size: Size | None,
        key: Hashable,
        program: Program,
        inputs: dict[str, torch.Tensor],
    ) -> Any:
        """Return what a program of a size returns, which `fitting` has named: all of it.

        Inputs of fewer requests, or rows, are followed by zeros. None: they have no other size.
        """
        kept = None if size is None else self._sizes[key].get(size)
        whole = kept or (key, *((name, x.shape, x.dtype) for name, x in inputs.items()))
        if (known := self._kept.pop(whole, None)) is not None:
            self._kept[whole] = known  # the last one used stands last
            _copy(inputs, known.inputs)
            known.tape.replay()
            return known.results
        if len(self._kept) >= self._most:
            self._drop_oldest()
        own = {name: self._input(name, x) for name, x in inputs.items()}
        _copy(inputs, own)
        while (made := self._recorded(program, own)) is None:
            self._keep_fewer()
        self._kept[whole] = made
        if size is not None:
            self._sizes[key][size] = whole
        return made.results

    def fitting(self, key: Hashable, least: Size, own: Size, most: Size | None = None) -> Size:
        """Return the size in which a program runs now whose inputs have `least`.

        That is `own`, of which it is kept, or the smallest that is kept already and is at least as
        large in every part, and at most as `most` in those behind the first: as long as the rows
        that this adds have not taken what it takes to capture one more.
        """
        found = self.kept_size(key, least, own, most)
        if found is None:
            return own
        self._padding[key, own] += math.prod(found) - math.prod(own)
        return found

    def kept_size(
        self, key: Hashable, least: Size, own: Size, most: Size | None = None
    ) -> Size | None:
        """Return the same where such a program is kept; None where it would be made."""
        kept = self._sizes[key]
        if own in kept:
            return own
        room = own[1:] if most is None else most[1:]
        larger = [
            one
            for one in kept
            if all(n >= needed for n, needed in zip(one, least, strict=True))
            and all(n <= limit for n, limit in zip(one[1:], room, strict=True))
        ]
        best = min(larger, key=math.prod, default=own)
        padding = self._padding[key, own] + math.prod(best) - math.prod(own)
        return best if best != own and padding <= _CAPTURE else None

    def depth_for(self, key: Hashable, depth: int, rows: Sequence[int], batch: int | None) -> int:
        """Return the depth of a draft that is kept for so many requests, or `depth` itself.

        Near a text's end drafts of a given size are wanted less and less deep. Each runs in the
        least deep one that is kept, as long as what this adds has not taken as long as to capture.
        """
        if self.in_python:
            return depth
        kept = (n for n in range(depth, len(rows)) if self._has((key, n), batch))
        best = next(kept, depth)
        added = (batch or 1) * (rows[best] - rows[depth])
        if self._padding[key, (depth,)] + added > _CAPTURE:
            return depth
        self._padding[key, (depth,)] += added
        return best

    def _has(self, key: Hashable, batch: int | None) -> bool:
        """Whether a program of a key is kept, for at least so many requests."""
        if batch is None:
            return any(known == key for known, *_ in self._kept)
        return any(requests >= batch for requests, *_ in self._sizes.get(key, ()))

    def _recorded(self, program: Program, inputs: dict[str, torch.Tensor]) -> _Kept | None:
        """Return a program that is kept now; None where there is no memory beside the others."""
        if not self._kept:
            self._tape = self._tapes()  # a pool that no graph is left in is none to torch
        try:
            tape = self._tape()
            with torch.no_grad():
                return _Kept(tape, inputs, tape.record(program, inputs))
        except torch.OutOfMemoryError:
            if not self._kept:
                raise
        return None  # what failed is gone with its error, and so is its memory

    def _keep_fewer(self) -> None:
        """Keep half as many programs from now on: for more there is no memory."""
        if self._most == _MOST_KEPT:
            warnings.warn("the GPU's memory is full: fewer shapes of passes are kept", stacklevel=3)
        self._most = max(1, len(self._kept) // 2)
        while len(self._kept) >= self._most:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the program that was used longest ago."""
        oldest = next(iter(self._kept))
        del self._kept[oldest]
        sizes = self._sizes.get(oldest[0], {})
        for size in [size for size, whole in sizes.items() if whole == oldest]:
            del sizes[size]

    def beside(self) -> Replayed:
        """Return the same way to run others, with memory of its own."""
        return Replayed(self._tapes, in_python=self.in_python)

    def _input(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return memory for an input, shared by all programs that have one of that shape."""
        key = name, like.shape, like.dtype
        if key not in self._inputs:
            self._inputs[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self._inputs[key]


def _copy(inputs: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
    """Copy inputs to where a program reads them, with zeros behind: on a GPU by few launches."""
    places = [to[name] for name in inputs]
    larger = [own for own, x in zip(places, inputs.values(), strict=True) if own.shape != x.shape]
    if larger:
        torch._foreach_zero_(larger)
        places = [
            own[tuple(map(slice, x.shape))] for own, x in zip(places, inputs.values(), strict=True)
        ]
    torch._foreach_copy_(places, list(inputs.values()))


def _first(found: Any, batch: int) -> Any:
    """Return what was found of the first requests."""
    if isinstance(found, torch.Tensor):
        return found[:batch]
    parts = [_first(one, batch) for one in found]
    return type(found)(*parts) if hasattr(found, "_fields") else type(found)(parts)


def recorded() -> Replayed:
    """Return what records programs as kernel calls, on a CPU."""
    from specattn.blocks.recorder import Memory, Recorder  # the C++ kernels

    def tapes() -> Callable[[], Tape]:
        memory = Memory()
        return lambda: Recorder(memory)

    return Replayed(tapes, in_python=True)


class _Captured:
    """A program in a graph, by operators that may be captured."""

    def __init__(self, graph: Graph, ops: Ops):
        self.graph, self.ops = graph, ops
        self.replay = graph.replay

    def record(self, program: Program, inputs: dict[str, torch.Tensor]) -> Any:
        found = []
        with _current(next(iter(inputs.values())).device):
            self.graph.capture(lambda: found.append(program(self.ops, **inputs)))
            self.replay()  # capturing computes nothing
        return found[-1]


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def captured(
    graphs: Callable[[], Callable[[], Graph]] | None = None, ops: Callable[[], Ops] = Ops
) -> Replayed:
    """Return what captures programs as CUDA graphs, by operators that ``ops()`` returns.

    `graphs`, for tests, returns what makes new graphs that share their memory.
    """
    make = cuda_graphs if graphs is None else graphs

    def tapes() -> Callable[[], Tape]:
        graph, own = make(), ops()
        return lambda: _Captured(graph(), own)

    return Replayed(tapes, in_python=False)

"""What ``specattn gpu-check`` calls: primitives at a few shapes, and whether a result is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import specattn
from specattn.gpu_checks import passes
from specattn.quantised import quantise, quantise_float8

Arguments = dict[str, Any]
Place = Callable[[torch.Tensor], torch.Tensor]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Q_HEADS, KV_HEADS, D = 32, 8, 128
LENGTHS = (900, 130)
# Of results in float32: sums on tensor cores are cut off, not rounded.
LUCK = {FP32: 2e-5, FP64: 2e-5}


@dataclass(frozen=True)
class Case:
    """A call of a primitive: ``make()`` returns its arguments on the CPU, every time the same.

    ``written`` are arguments that it writes instead of returning something, ``exact`` whether the
    result must be the reference's own. What is no primitive says what to ``call`` instead.
    """

    op: str
    label: str
    make: Callable[[], Arguments]
    written: tuple[str, ...] = ()
    exact: bool = False
    call: Callable[..., Any] | None = None

    @property
    def is_gluons(self) -> bool:
        """Whether the kernel in Gluon serves it: 16-bit caches, D 64 or 128.

        Where it collects there must be 17 rows and more.
        """
        if self.op not in ("hybrid_tree_attention", "verify_attention"):
            return False
        given = self.make()
        if "cu_seqlens_q" in given or given["q"].shape[-1] not in (64, 128):
            return False
        least = 16 if self.op == "verify_attention" else 0
        many = given["q"].shape[-3] * Q_HEADS > least * KV_HEADS
        return many and given["q"].dtype == given["k_cache"].dtype != FP32

    def __str__(self) -> str:
        return f"{self.op} {self.label}".rstrip()

    def run(self, arguments: Arguments) -> list[torch.Tensor]:
        """Return what the primitive makes of its arguments, as a list."""
        result = (self.call or getattr(specattn, self.op))(**arguments)
        if self.written:
            return [arguments[name] for name in self.written]
        return list(result) if isinstance(result, tuple) else [result]


@dataclass(frozen=True)
class Verdict:
    """What became of a case, and why.

    It is "right", "wrong", "declined", "failed", "lost" or "not done".
    """

    backend: str
    case: str
    state: str
    said: str = ""


def check(case: Case, backend: str, place: Place, captures: bool = False) -> list[Verdict]:
    """Run a case on a backend, its tensors where `place` puts them, and hold it against float64.

    A result may err twice as much as torch does in the same dtype. With `captures` the call is
    replayed in a CUDA graph too, to the same bits; a pass replays its own.
    """
    verdict = partial(Verdict, backend, str(case))
    expected, rough = (_reference(case, dtype) for dtype in (FP64, None))
    try:
        with using(backend), _poisoned():
            arguments = _moved(case.make(), place)
            found = [x.detach().cpu().clone() for x in case.run(arguments)]
    except RuntimeError as error:
        if "no backend serves" in str(error):
            return [verdict("declined", str(error).partition(f"{backend}': ")[2].rstrip("'}"))]
        return [verdict("failed", _one_line(error))]
    except Exception as error:  # whatever a first day brings
        return [verdict("failed", _one_line(error))]
    problems = [
        problem
        for result, exact, own in zip(found, expected, rough, strict=True)
        if (problem := _difference(result, exact, own, case.exact))
    ]
    verdicts = [verdict("wrong", problems[0]) if problems else verdict("right")]
    if captures and not problems and not case.written and case.call is None:
        verdicts.append(_replayed(case, backend, place, found))
    return verdicts


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Force a backend: "triton" without its kernel in Gluon, "gluon" with it."""
    with ExitStack() as stack:
        if backend in ("triton", "gluon"):
            from specattn.triton_kernels import _configs

            stack.enter_context(_configs.forced(hopper=backend == "gluon"))
        stack.enter_context(specattn.use_backend("triton" if backend == "gluon" else backend))
        yield


@contextmanager
def _poisoned() -> Iterator[None]:
    """Let memory that is allocated hold NaN: it may be that of the results which are expected."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _reference(case: Case, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Return the reference's results in `dtype`, or in the types that are given."""

    def converted(x: Any) -> Any:
        if dtype and isinstance(x, torch.Tensor) and x.is_floating_point() and x.element_size() > 1:
            return x.to(dtype)
        return x

    arguments = {name: converted(x) for name, x in case.make().items()}
    for name in ("k_scale", "v_scale", "scale", "up_scale"):  # which have types of their own
        if name in arguments:
            arguments[name] = case.make()[name]
    if case.exact:
        arguments = case.make()
    with specattn.use_backend("reference"):
        return case.run(arguments)


def _moved(arguments: Arguments, place: Place) -> Arguments:
    return {n: place(x) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


def _difference(
    result: torch.Tensor, exact: torch.Tensor, rough: torch.Tensor, equal: bool
) -> str | None:
    """Return how a result differs from what it should be, or None."""
    if result.shape != exact.shape:
        return f"shape {list(result.shape)}, expected {list(exact.shape)}"
    if equal:
        apart = int((result.double() != exact.double()).sum())
        return f"{apart} of {exact.numel()} elements differ" if apart else None
    a, b = result.double(), exact.double()
    finite = b.isfinite()
    if a.isnan().any() or not torch.equal(a[~finite], b[~finite]):
        return f"{int(a.isnan().sum())} NaN, and infinities that differ or none"
    if not finite.any():
        return None
    error = (a - b)[finite].abs().max().item()
    own = (rough.double() - b)[finite].abs().max().item()
    allowed = 2 * own + LUCK.get(result.dtype, 1e-6) * max(1.0, b[finite].abs().max().item())
    return f"error {error:.2e}, allowed {allowed:.2e}" if error > allowed else None


def _replayed(case: Case, backend: str, place: Place, before: list[torch.Tensor]) -> Verdict:
    """Capture a call that has run once, and compare what its replay leaves."""
    verdict = partial(Verdict, backend, f"{case}, in a graph")
    try:
        with using(backend):
            arguments, graph = _moved(case.make(), place), torch.cuda.CUDAGraph()
            case.run(arguments)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                results = case.run(arguments)
            graph.replay()
            torch.cuda.synchronize()
    except Exception as error:
        return verdict("failed", _one_line(error))
    same = all(torch.equal(x.cpu(), y) for x, y in zip(results, before, strict=True))
    return verdict("right") if same else verdict("wrong", "other bits than eagerly")


@dataclass(frozen=True)
class _Attention:
    """The tensors of attention over two requests."""

    rows: int
    dtype: torch.dtype = BF16
    paged: bool = False
    stored: torch.dtype | None = None
    options: Arguments = field(default_factory=dict)
    head_dim: int = D

    def tree(self) -> specattn.Tree:
        return specattn.Tree([i // 2 if i % 3 else i - 1 for i in range(self.rows)])

    def make(self, new: tuple[str, str] = ("k_tree", "v_tree"), lengths: bool = True) -> Arguments:
        generator = torch.Generator().manual_seed(self.rows)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float32).to(self.dtype)

        batch, capacity = len(LENGTHS), 1024
        shape = (batch * capacity // 16, 16) if self.paged else (batch, capacity)
        given: Arguments = {"q": normal(batch, self.rows, Q_HEADS, self.head_dim)}
        caches = {name: normal(*shape, KV_HEADS, self.head_dim) for name in ("k_cache", "v_cache")}
        if self.stored:
            caches = {n: (20 * x.float()).to(self.stored) for n, x in caches.items()}
            scale = torch.rand(*shape, KV_HEADS, generator=generator, dtype=torch.float32) / 20
            given |= {"k_scale": scale, "v_scale": scale.flip(0)}
        given |= caches | {name: normal(batch, self.rows, KV_HEADS, self.head_dim) for name in new}
        given["tree_mask"] = None if self.rows == 1 else self.tree().packed_mask
        if self.paged:
            order = torch.randperm(shape[0], generator=generator).int()
            given["block_table"] = order.view(batch, -1)
        if lengths:
            given["cache_seqlens"] = torch.tensor(LENGTHS, dtype=torch.int32)
        return given | self.options


def _ragged() -> Arguments:
    given = _Attention(8).make()
    rows = torch.tensor([0, 3, 11], dtype=torch.int32)
    flat = {name: given[name].flatten(0, 1)[5:] for name in ("q", "k_tree", "v_tree")}
    plain = {"tree_mask": None, "cu_seqlens_q": rows, "max_seqlen_q": 8}
    return given | flat | plain


def _gathered(paged: bool, per_row: bool = False, rows: int = 4, head_dim: int = D) -> Arguments:
    given = _Attention(rows, paged=paged, head_dim=head_dim).make(("k_new", "v_new"), lengths=False)
    lists = rows if per_row else KV_HEADS
    chosen = torch.rand(
        2, lists, 130, generator=torch.Generator().manual_seed(1), dtype=torch.float32
    ).argsort(-1)
    lengths = torch.full((2, lists), 60, dtype=torch.int32)
    indices = chosen.sort(-1).values[..., :60].int()
    return given | {"indices": indices, "index_lengths": lengths, "per_row": per_row}


def _importance() -> Arguments:
    given = _Attention(4, paged=True).make()
    return {name: given[name] for name in ("q", "k_cache", "cache_seqlens", "block_table")}


def _tree() -> Arguments:
    given = _Attention(16).make(("k_new", "v_new"))
    return {name: given[name] for name in ("q", "k_new", "v_new", "tree_mask")}


def _selection() -> Arguments:
    scores = torch.randn(
        2, KV_HEADS, 4096, generator=torch.Generator().manual_seed(2), dtype=torch.float32
    )
    lengths = torch.tensor([4096, 700], dtype=torch.int32)
    return {"scores": scores, "cache_seqlens": lengths, "ratio": 0.07}


def _states() -> Arguments:
    generator = torch.Generator().manual_seed(3)
    outs = torch.randn(5, 2, 4, Q_HEADS, D, generator=generator, dtype=torch.float32).bfloat16()
    return {
        "outs": outs,
        "lses": torch.randn(5, 2, 4, Q_HEADS, generator=generator, dtype=torch.float32),
    }


def _written(stored: torch.dtype) -> Arguments:
    generator = torch.Generator().manual_seed(4)
    k, v = torch.randn(2, 2, 6, KV_HEADS, D, generator=generator, dtype=torch.float32).bfloat16()
    caches = {
        name: torch.zeros(8, 16, KV_HEADS, D, dtype=torch.float32).to(stored)
        for name in ("k_cache", "v_cache")
    }
    slots = torch.randperm(128, generator=generator)[:12].view(2, 6)
    given: Arguments = {"k": k, "v": v, **caches, "slots": slots}
    if stored == BF16:
        return given
    scales = {
        name: torch.zeros(8, 16, KV_HEADS, dtype=torch.float32) for name in ("k_scale", "v_scale")
    }
    return given | scales | {"scale": "dynamic"}


def _noise() -> Arguments:
    logits = torch.randn(4, 32000, generator=torch.Generator().manual_seed(5), dtype=torch.float32)
    return {"logits": logits, "seed": 7, "requests": torch.arange(4), "positions": torch.arange(4)}


def _layer(rows: int, outputs: int, depth: int, dtype: torch.dtype) -> Arguments:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    x, residual, bias = normal(rows, depth), normal(rows, outputs), normal(outputs)
    weight, up = normal(2, outputs, depth) * depth**-0.5
    given = {"x": x, "weight": weight, "bias": bias, "up": up, "residual": residual}
    return {name: x.to(dtype) for name, x in given.items()} | {"activation": "silu"}


def _codes(rows: int, outputs: int, depth: int, kind: str, group: int | None = 64) -> Arguments:
    given = _layer(rows, outputs, depth, BF16)
    for name, scale in (("weight", "scale"), ("up", "up_scale")):
        weight = given[name]
        if kind == "fp8":
            few = quantise_float8(weight)
        else:
            few = quantise(weight, 8 if kind == "int8" else 4, group)
        given |= {name: few.codes, scale: few.scale}
    return given


def _gated() -> Arguments:
    generator = torch.Generator().manual_seed(6)
    q, k = torch.randn(2, 2, 8, 4, D, generator=generator, dtype=torch.float32).bfloat16()
    v = torch.randn(2, 8, 8, D, generator=generator, dtype=torch.float32).bfloat16()
    g, beta = torch.rand(2, 2, 8, 8, generator=generator, dtype=torch.float32)
    given: Arguments = {"q": q, "k": k, "v": v, "g": -g, "beta": beta, "l2_norm": True}
    given["state"] = torch.randn(2, 8, D, D, generator=generator, dtype=torch.float32)
    return given | {"parents": torch.tensor([-1, 0, 0, 1, 2, 2, 4, 5])}


def _accepted() -> Arguments:
    generator = torch.Generator().manual_seed(7)
    stash = torch.randn(2, 8, 8, 2 * D + 1, generator=generator, dtype=torch.float32) / 8
    path = {"nodes": torch.tensor([[0, 2, 4], [0, 0, 0]]), "counts": torch.tensor([3, 0])}
    return {
        "state": torch.randn(2, 8, D, D, generator=generator, dtype=torch.float32),
        "stash": stash,
        **path,
    }


def _convolution() -> Arguments:
    generator = torch.Generator().manual_seed(8)
    x, kept = (
        torch.randn(2, n, 512, generator=generator, dtype=torch.float32).bfloat16() for n in (8, 3)
    )
    weight = torch.randn(512, 4, generator=generator, dtype=torch.float32).bfloat16()
    given: Arguments = {"x": x, "weight": weight, "bias": None, "conv_state": kept}
    return given | {"parents": torch.tensor([-1, 0, 0, 1, 2, 2, 4, 5]), "activation": "silu"}


def _kept() -> Arguments:
    given, path = _convolution(), _accepted()
    return {n: given[n] for n in ("conv_state", "x")} | {n: path[n] for n in ("nodes", "counts")}


def _hybrid(
    label: str,
    rows: int,
    dtype: torch.dtype = BF16,
    paged: bool = False,
    stored: torch.dtype | None = None,
    **options: Any,
) -> Case:
    attention = _Attention(rows, dtype, paged, stored, options)
    return Case("hybrid_tree_attention", label, attention.make)


def _any_size() -> Iterator[Case]:
    """Yield heads that fill no tile, in tiles of few rows and of many."""
    for head_dim in (8, 24, 40, 200):
        for rows in (7, 16):
            label, attention = f"{rows} rows, D {head_dim}", _Attention(rows, head_dim=head_dim)
            yield Case("hybrid_tree_attention", label, attention.make)
        yield Case("verify_attention", f"scores, 16 rows, D {head_dim}", attention.make)
        gathered = partial(_gathered, True, rows=16, head_dim=head_dim)
        yield Case("sparse_gather_attention", f"16 rows, D {head_dim}", gathered)


def _passes() -> Iterator[Case]:
    """Yield captured passes: weights in 16, 8 and 4 bits, caches in 8."""
    kinds = (None, "int8"), ("int8", None), ("int4", None), ("fp8", None), ("int4", "fp8")
    for quantize, kv_dtype in ((None, None), *kinds):
        label = ", ".join(
            f"{what} {kind}" for what, kind in (("weights", quantize), ("cache", kv_dtype)) if kind
        )
        call = partial(passes.run, quantize=quantize, kv_dtype=kv_dtype)
        yield Case("captured_pass", label, passes.make, call=call)


_SINKS = torch.linspace(-2, 3, Q_HEADS, dtype=torch.float32)
_COLLECTED: dict[str, Any] = {"collect": "logits", "collect_rows": (0, -1)}
_CACHES = ("k_cache", "v_cache")
CASES = (
    _hybrid("1 row", 1),
    _hybrid("16 rows", 16),
    _hybrid("32 rows", 32),
    _hybrid("16 rows, pages, window, fp16", 16, FP16, True, window=200, softcap=20.0),
    _hybrid("4 rows, sinks", 4, sinks=_SINKS),
    _hybrid("4 rows, fp32", 4, FP32),
    _hybrid("4 rows, int8", 4, BF16, False, torch.int8),
    _hybrid("16 rows, pages, e4m3", 16, BF16, True, torch.float8_e4m3fn),
    Case("hybrid_tree_attention", "ragged", _ragged),
    Case("verify_attention", "scores", _Attention(4).make),
    Case("verify_attention", "scores, 16 rows", _Attention(16).make),
    Case("verify_attention", "scores, 32 rows", _Attention(32).make),
    Case("verify_attention", "logits", _Attention(4, paged=True, options=_COLLECTED).make),
    Case("sparse_gather_attention", "", partial(_gathered, False)),
    Case("sparse_gather_attention", "pages", partial(_gathered, True)),
    Case("sparse_gather_attention", "a list for each row", partial(_gathered, True, True)),
    Case("tree_attention", "", _tree),
    Case("importance_scores", "pages", _importance),
    Case("select_topk", "", _selection, exact=True),
    Case("merge_states", "", _states),
    Case("write_kv", "pages", partial(_written, BF16), _CACHES, exact=True),
    Case(
        "write_kv", "int8, scales that it chooses", partial(_written, torch.int8),
        (*_CACHES, "k_scale", "v_scale"), exact=True,
    ),
    Case("add_gumbel_noise", "", _noise),
    Case("linear_few_rows", "8 rows, gate and up", partial(_layer, 8, 4096, 1024, BF16)),
    Case("linear_few_rows", "40 rows, no multiples", partial(_layer, 40, 1000, 1001, FP16)),
    Case("linear_few_rows", "20 rows, fp32", partial(_layer, 20, 512, 320, FP32)),
    Case("linear_few_rows", "8 rows, int8", partial(_codes, 8, 4096, 1024, "int8")),
    Case("linear_few_rows", "1 row, int4", partial(_codes, 1, 4096, 1024, "int4")),
    Case("linear_few_rows", "40 rows, int4 by rows", partial(_codes, 40, 512, 328, "int4", None)),
    Case("linear_few_rows", "20 rows, fp8", partial(_codes, 20, 1000, 1001, "fp8")),
    Case("gated_delta_tree", "", _gated),
    Case("gated_delta_commit", "", _accepted, ("state",)),
    Case("causal_conv_tree", "", _convolution),
    Case("causal_conv_commit", "", _kept, ("conv_state",), exact=True),
    *_any_size(),
    *_passes(),
)  # fmt: skip

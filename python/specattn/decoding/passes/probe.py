"""Finds the layer in which a model with our attention differs from itself, by random tokens.

Two requests of unequal lengths are prefilled in chunks, and a tree is verified behind them. The
model itself sees every path of the tree as a text of its own, whole and causal: its masks are its
own, and owe nothing to ours. Sliding windows are made short enough for both to slide; texts longer
than a real window would take too long.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.func import functional_call
from transformers import PreTrainedModel

from specattn.decoding.model.families import windows_of
from specattn.decoding.model.latents import latent_modules
from specattn.decoding.model.structure import Structure, bare, structure_of, uncompiled
from specattn.decoding.passes.attention import Pass
from specattn.decoding.passes.cached_model import CachedModel, new_cache
from specattn.decoding.passes.interface import attach, eager_attention
from specattn.decoding.passes.runner import Verification, modules_of
from specattn.tree import Tree

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_LENGTHS = (21, 13)
_CHUNK = 8
_WINDOW = 6
_PARENTS = (-1, 0, 0, 1, 1, 2, 5)
_PATHS = ((0, 1, 3), (0, 1, 4), (0, 2, 5, 6))
_CAPACITY = max(_LENGTHS) + len(_PARENTS)


class Mismatch(NamedTuple):
    """How far two ways of computing a model are apart, and where they first differ."""

    error: float
    where: str


class _Rows(NamedTuple):
    """What the tokens of all requests became: logits [R, V], and attention [R, Hq, D] by layer."""

    logits: torch.Tensor
    attended: list[torch.Tensor]


@torch.no_grad()
def first_mismatch(model: PreTrainedModel, bound: float) -> Mismatch | None:
    """Return where our attention differs from the model's own by more than `bound`, if it does.

    In 16 bits the model's own attention errs by something too, against float32; ours may by twice
    as much. ValueError: a layer needs what is not served, or does not call for attention at all.
    """
    kind = model.config.model_type
    generator = torch.Generator().manual_seed(0)
    size = (len(_LENGTHS), _CAPACITY)
    tokens = torch.randint(model.config.vocab_size, size, generator=generator, device="cpu").to(
        model.device
    )
    attach(model)
    structure = structure_of(model)
    own = model if not structure.at_ends else _without_functions_at_ends(model)
    try:
        expected, found = _by_itself(own, tokens), _by_ours(own, tokens)
        if expected.logits.dtype in _SIXTEEN_BITS:
            rounded, expected = expected, _by_itself(own, tokens, precise=True)
            bound = max(bound, 2 * _error(rounded.logits, expected.logits))
        mismatch = _mismatch(found, expected, bound)
        if mismatch is None and structure.at_ends:
            error = _error_as_called(model, tokens, structure)
            if not error <= bound:
                mismatch = Mismatch(error, "what a call of the whole model does")
        return mismatch
    except (TypeError, AttributeError, RuntimeError, IndexError) as problem:
        message = str(problem).partition("\n")[0]
        if structure.replaced is not None:
            message = f"{structure.replaced}, and: {message}"
        raise ValueError(
            f"models of type {kind!r} are not supported: their layers cannot be served with keys "
            f"and values from a cache of ours: {message}"
        ) from problem


def _mismatch(found: _Rows, expected: _Rows, bound: float) -> Mismatch | None:
    error = _error(found.logits, expected.logits)
    if error <= bound:  # a NaN is no agreement
        return None
    for layer, (ours, theirs) in enumerate(zip(found.attended, expected.attended, strict=True)):
        if not _error(ours, theirs) <= bound:
            return Mismatch(error, f"the attention of layer {layer}")
    return Mismatch(error, "what follows the attention of the last layer")


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of a row: of the worst, or of the median in 16 bits.

    There a near-tie of a mixture's router sends a token to another expert now and then.
    """
    errors = _row_errors(found.flatten(1).double(), expected.flatten(1).double())
    if found.dtype not in _SIXTEEN_BITS:
        return errors.max().item()
    requests = [n + len(_PARENTS) for n in _LENGTHS]
    halves = [
        rows
        for request, n in zip(errors.split(requests), _LENGTHS, strict=True)
        for rows in (request[:n], request[n:])
    ]
    return max(rows.median().item() for rows in halves)


def _row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return relative errors of rows [R, N]; infinities that are the same agree."""
    same = found.isinf() & (found == expected)
    found, expected = found.masked_fill(same, 0.0), expected.masked_fill(same, 0.0)
    apart = (found - expected).norm(dim=-1)
    return torch.where(apart.isfinite() & (apart > 0), apart / expected.norm(dim=-1), apart)


def _without_functions_at_ends(model: PreTrainedModel) -> Any:
    """Return the model without what a user has put around it and its base."""
    return bare(model, **{model.base_model_prefix: bare(model.base_model)})


def _error_as_called(model: PreTrainedModel, tokens: torch.Tensor, structure: Structure) -> float:
    """Return the error of a tree's logits, of whole texts that the model is called with."""
    ends = accumulate(n + len(_PARENTS) for n in _LENGTHS)
    nodes = [row for end in ends for row in range(end - len(_PARENTS), end)]
    texts, positions = ([side[row] for row in nodes] for side in _positions())
    whole: Any = model
    expected = whole(input_ids=_texts(tokens), use_cache=False).logits
    windows = windows_of(model.config, _CAPACITY)
    called = CachedModel(model, new_cache(model, len(_LENGTHS), _CAPACITY), windows)
    called.runner = modules_of(model, structure)
    found = _verified(called, tokens).logits.flatten(0, 1)
    errors = _row_errors(found.double(), expected[texts, positions].double())
    few_bits = found.dtype in _SIXTEEN_BITS
    return (errors.median() if few_bits else errors.max()).item()


class _Eager:
    """The model's own layers, in float32 if need be: keeps what they give out."""

    def __init__(self, model: PreTrainedModel, precise: bool) -> None:
        self.with_latents, self.precise = set(latent_modules(model).values()), precise
        self.attended: dict[int, torch.Tensor] = {}

    def __call__(self, module: Any, *tensors: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        own = eager_attention(module)
        if own is None:
            raise TypeError(f"{type(module).__name__} has no eager attention beside it")
        dtype = tensors[0].dtype
        if self.precise:
            tensors = tuple(x.float() for x in tensors)
        output = own(module, *tensors, **options)[0].to(dtype)
        self.attended[module.layer_idx] = output
        return output, None

    def run_layer(self, module: Any, hidden: Any, options: dict[str, Any]) -> Any:
        """Run a layer with latents, or one that keeps a state, by itself."""
        if module in self.with_latents:
            return type(module).forward(module, hidden, specattn_pass=self, **options)
        weights = dict(module.named_parameters())
        if self.precise:
            weights = {name: x.float() for name, x in weights.items()}
        rows = hidden.float() if self.precise else hidden
        output = functional_call(module, weights, (rows,), options).to(hidden.dtype)
        self.attended[module.layer_idx] = output
        return output


def _by_itself(model: PreTrainedModel, tokens: torch.Tensor, precise: bool = False) -> _Rows:
    """Run every path of every request as a text."""
    eager, ids = _Eager(model, precise), _texts(tokens)
    logits = _with_short_windows(model)(input_ids=ids, use_cache=False, specattn_pass=eager).logits
    layers = model.config.num_hidden_layers
    if others := sorted(eager.attended.keys() - set(range(layers))):
        raise TypeError(
            f"num_hidden_layers is {layers} in its configuration, and the layer_idx of another "
            f"layer that it runs is {others[0]}"
        )
    if missing := [n for n in range(layers) if n not in eager.attended]:
        raise TypeError(f"layer {missing[0]} of {layers} does not ask for attention")
    index = _positions()
    attended = [eager.attended[n][index] for n in range(layers)]
    return _Rows(logits[index], attended)


def _texts(tokens: torch.Tensor) -> torch.Tensor:
    """Return every path of every request as a text, [texts, L], padded behind its end."""
    texts = [
        torch.cat([row[:n], row[n:][list(path)]])
        for row, n in zip(tokens, _LENGTHS, strict=True)
        for path in _PATHS
    ]
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)


def _positions() -> tuple[list[int], list[int]]:
    """Return text and position there of every token that is compared."""
    texts: list[int] = []
    positions: list[int] = []
    for request, n in enumerate(_LENGTHS):
        first = request * len(_PATHS)
        texts += [first] * n
        positions += range(n)
        for node in range(len(_PARENTS)):
            path = next(p for p, nodes in enumerate(_PATHS) if node in nodes)
            texts.append(first + path)
            positions.append(n + _PATHS[path].index(node))
    return texts, positions


def _with_short_windows(model: PreTrainedModel) -> Any:
    """Return the model with eager masks of short windows; all its modules are the model's own."""
    config = copy.copy(model.config)
    config._attn_implementation = "eager"
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = min(config.sliding_window, _WINDOW)
    base = uncompiled(copy.copy(model.base_model))
    outer = uncompiled(copy.copy(model))
    base.config = config
    vars(outer)["_modules"] = {**model._modules, model.base_model_prefix: base}
    return outer


@dataclass
class _Witnessed(Pass):
    """A pass which keeps what each layer attended to, whatever window the model names."""

    seen: dict[int, list[Sequence[torch.Tensor]]] = field(default_factory=dict)

    def has_window(self, layer: int, window: int | None) -> bool:
        return window is None or self.windows[layer] is not None

    def attend(self, layer: int, *heads: Any, **options: Any) -> torch.Tensor:
        return self._see(layer, super().attend(layer, *heads, **options))

    def attend_latents(self, ops: Any, layer: int, *given: Any) -> torch.Tensor:
        return self._see(layer, super().attend_latents(ops, layer, *given))

    def run_layer(self, module: Any, *given: Any) -> Any:
        out = super().run_layer(module, *given)
        return out if isinstance(out, tuple) else self._see(module.layer_idx, out)

    def _see(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        self.seen[layer].append(out[0].split(list(self.counts)) if self.counts else out.unbind())
        return out


class _Probe(CachedModel):
    """Two requests with short windows."""

    def __init__(self, model: PreTrainedModel):
        windows = windows_of(model.config, sys.maxsize)
        windows = [None if window is None else min(window, _WINDOW) for window in windows]
        self.seen: dict[int, list[Sequence[torch.Tensor]]] = defaultdict(list)
        super().__init__(model, new_cache(model, len(_LENGTHS), _CAPACITY), windows)

    def plan(self, rows: int, offset: Any = 0, max_seqlen: int | None = None) -> Pass:
        own = super().plan(rows, offset, max_seqlen)
        return _Witnessed(**vars(own), seen=self.seen)


def _by_ours(model: PreTrainedModel, tokens: torch.Tensor) -> _Rows:
    """Prefill both requests in chunks and verify a tree."""
    probe = _Probe(model)
    features: list[Sequence[torch.Tensor]] = []
    verified = _verified(probe, tokens, lambda _, rows: features.append(rows))
    logits = probe.logits_of(_by_request([*features, verified.features.unbind()]))
    attended = [_by_request(probe.seen[n]) for n in range(len(probe.windows))]
    return _Rows(logits, attended)


def _verified(
    model: CachedModel, tokens: torch.Tensor, on_features: Callable[..., None] | None = None
) -> Verification:
    """Prefill both requests and return what is verified of a tree behind them."""
    prompts = [row[:n] for row, n in zip(tokens, _LENGTHS, strict=True)]
    model.prefill(prompts, _CHUNK, on_features=on_features)
    drafted = [row[n:][: len(_PARENTS)] for row, n in zip(tokens, _LENGTHS, strict=True)]
    tree = Tree(torch.tensor(_PARENTS, device=model.device))
    return model.verify(tree, torch.stack(drafted))


def _by_request(passes: list[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return the rows of all passes, given by request: those of the first request come first."""
    return torch.cat([rows for own in zip(*passes, strict=True) for rows in own])

"""A prefilled batch that any number of methods start from, one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch.nn.functional import pad
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from specattn.decoding.engine.loop import prefill, run_rounds
from specattn.decoding.engine.method import (
    Method,
    OnTokens,
    RunOptions,
    Texts,
    announcing,
    context_of,
)
from specattn.decoding.engine.target import Target
from specattn.decoding.model.families import keeps_state
from specattn.decoding.text.statistics import Statistics, Stopwatch, synchronize


class PromptSnapshot:
    """A target whose prompts, all of one length, are prefilled once, ahead of any number of runs.

    Decoding only writes behind the prompts, so going back is a matter of lengths. Requests that end
    earlier than others let rows move; a batch therefore keeps a copy of its prompts on the host.
    States of layers that keep one change with every token, so they are copied in any case.
    So are the prompts' features that `readers` learn from.

    `prefill_seconds` are of all prompt tokens but the last of each. ValueError: the target shares
    its cache or its model with other ranks.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[torch.Tensor],
        *,
        readers: Iterable[Method] = (),
    ):
        if target.lockstep is not None or target.tensor_parallel is not None:
            raise ValueError("a snapshot serves one rank; give several ranks generate")
        self.target, self.prompts = target, list(prompts)
        self.prefix = len(prompts[0]) - 1
        self._rows = target.cache.storage
        self._copy: torch.Tensor | None = None
        self._states: tuple[torch.Tensor, torch.Tensor] | None = None
        read = [one.prepared(target.model) for one in readers if one.reads_features]
        layers = (n for one in read for n in one.feature_layers(target.model))
        self._layers = tuple(dict.fromkeys(layers))
        self._features: list[tuple[int, Sequence[torch.Tensor]]] = []
        self.prefill_seconds = self._prefill()

    def restore(self) -> None:
        """Let the cache hold the prompts and nothing else."""
        cache = self.target.cache
        if self._copy is not None:
            for row, kept in zip(self._prompt_rows(), self._copy, strict=True):
                row.copy_(kept)
        if cache.states is not None and self._states is not None:
            cache.states.restore(self._states)
        cache.storage = self._rows
        cache.seqlens = torch.full(
            (len(self.prompts),), self.prefix, dtype=torch.int32, device=self._rows.device
        )

    @torch.no_grad()
    def run(
        self,
        method: Method,
        new_tokens: int,
        processors: LogitsProcessorList,
        *,
        do_sample: bool,
        seed: int,
        on_tokens: OnTokens | None = None,
    ) -> tuple[list[list[int]], Statistics]:
        """Return the `new_tokens` of every prompt, and figures; an end of text ends nothing.

        `do_sample` as for `Sampler`, `on_tokens` as for `specattn.decoding.generate`. ValueError:
        the method reads features, which were not kept.
        """
        target, rows, length = self.target, len(self.prompts), self.prefix + 1 + new_tokens
        rules = [processors] * rows, [StoppingCriteriaList([MaxLengthCriteria(length)])] * rows
        texts = Texts(self.prompts, [0] * rows, *rules)
        method = method.prepared(target.model).clipped(texts.most_new - 1)
        layers = method.feature_layers(target.model)
        if method.reads_features and not {*layers} <= {*self._layers}:
            raise ValueError(f"{type(method).__name__} reads features: give it as a reader")
        options = RunOptions(on_tokens=on_tokens, seed=seed)
        context = context_of(target, method, texts, options, do_sample=do_sample)
        self.restore()
        with target.in_use():
            drafter = method.start(context)
            # A drafter looks at the cache as it was behind each chunk.
            seqlens = target.cache.seqlens
            for start, features in self._features if method.reads_features else ():
                target.cache.seqlens = seqlens.clamp(max=start + len(features[0]))
                drafter.on_prefill(start, self._of_layers(features, layers))
            target.cache.seqlens = seqlens
            watch = Stopwatch(target.device)
            statistics = run_rounds(context, drafter, watch, announcing(options))
        return [context.sequences.new_tokens(row) for row in range(rows)], statistics

    def as_dynamic_cache(self) -> DynamicCache:
        """Return the prompts' keys, values and states as transformers' `generate` caches them."""
        config = self.target.model.config
        cache = DynamicCache(config=config)
        rows = iter(self._rows)
        states = zip(*self._states, strict=True) if self._states is not None else iter(())
        for layer, keeps in enumerate(keeps_state(config)):
            if keeps:
                state, conv_state = next(states)
                # As many inputs as the convolution has taps; the first is not read again.
                cache.update_conv_state(pad(conv_state.mT, (1, 0)), layer)
                cache.update_recurrent_state(state, layer)
            else:
                cache.update(*self._as_transformers_caches(next(rows)[:, :, : self.prefix]), layer)
        return cache

    def _keep(self) -> None:
        """Copy the prompts' part of the cache to the host."""
        rows = self._prompt_rows()
        self._copy = torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
        for row, kept in zip(rows, self._copy, strict=True):
            kept.copy_(row)

    def _prompt_rows(self) -> torch.Tensor:
        """Return the prompts' part of the cache, [layers * 2 * batch, prefix, ...].

        Each row lies in one piece, so it is copied to the host without a copy on the device.
        """
        return self._rows.flatten(0, 2)[:, : self.prefix]

    def _of_layers(
        self, features: Sequence[torch.Tensor], layers: tuple[int, ...]
    ) -> Sequence[torch.Tensor]:
        """Return of the kept features those of some layers."""
        if layers == self._layers:
            return features
        at = [self._layers.index(n) for n in layers]
        return [x.unflatten(-1, (len(self._layers), -1))[:, at].flatten(1) for x in features]

    def _as_transformers_caches(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [B, Hk, n, D] of a layer, or latents and turned keys."""
        latent, rows = self.target.cache.latent, rows.transpose(2, 3)
        if latent is None:
            return rows[0], rows[1]
        return rows[0, ..., :latent], rows[0, ..., latent:]

    @torch.no_grad()
    def _prefill(self) -> float:
        """Prefill; return the seconds that it took."""
        synchronize(self.target.device)
        start = time.perf_counter()
        with self.target.in_use():
            keep = None
            if self._layers:
                self.target.hand_out(self._layers)
                keep = lambda *chunk: self._features.append(chunk)  # noqa: E731
            prefill(self.target, self.prompts, on_features=keep)
        synchronize(self.target.device)
        seconds = time.perf_counter() - start
        if len(self.prompts) > 1:
            self._keep()
        if (states := self.target.cache.states) is not None:
            self._states = states.copy()
        return seconds

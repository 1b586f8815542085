"""A target that has read its prompts: every method starts from the same cache, time after time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)

from specattn.decoding.loop import CHUNK_SIZE, decode
from specattn.decoding.method import Method
from specattn.decoding.sampling import TargetLaw
from specattn.decoding.sequences import Sequences
from specattn.decoding.statistics import Statistics
from specattn.decoding.target import Target


class ReadyTarget(Target):
    """A `Target` whose prefill is done once, ahead of any number of runs.

    Decoding only writes behind the prompts, so going back is a matter of lengths. Requests that end
    earlier than others let rows move; a batch therefore keeps a copy of its prompts on the host.

    Parameters
    ----------
    model : PreTrainedModel
    prompts : sequence of Tensor, int64 [context]
        All of one length.
    room : int
        Tokens that can follow each prompt.
    keep_features : bool
        Whether methods that read the prompts' features will run: all of them are kept for these.

    Attributes
    ----------
    prefill_seconds : float or None
        Of all prompt tokens but the last of each; None where no prefill took place.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[torch.Tensor],
        room: int,
        *,
        keep_features: bool = False,
    ):
        self.prompts = list(prompts)
        self.prefix = len(prompts[0]) - 1
        super().__init__(model, len(prompts), self.prefix + 1 + room)
        self._rows = self.cache.storage
        self._copy: torch.Tensor | None = None
        self._features: list[tuple[int, torch.Tensor]] | None = [] if keep_features else None
        self.prefill_seconds: float | None = None
        self._fill(prompts)

    def go_back(self) -> None:
        """Let the cache hold the prompts and nothing else."""
        if self._copy is not None:
            self._rows[:, :, :, : self.prefix] = self._copy.to(self.device)
        self.cache.storage = self._rows
        batch = self._rows.shape[2]
        self.cache.seqlens = torch.full(
            (batch,), self.prefix, dtype=torch.int32, device=self.device
        )

    def prefill(
        self,
        prompts: Sequence[torch.Tensor],
        chunk_size: int,
        on_chunk: Callable[[int, int], None] | None = None,
        on_features: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """Run nothing: the prompts are there, and their features are shown again."""
        assert all(len(prompt) == self.prefix for prompt in prompts)
        if on_features is not None and self._features is not None:
            lengths = self.cache.seqlens
            for start, features in self._features:
                self.cache.seqlens = lengths.clamp(max=start + features.shape[1])
                on_features(start, features)
            self.cache.seqlens = lengths

    def run(
        self,
        method: Method,
        new_tokens: int,
        processors: LogitsProcessorList,
        *,
        do_sample: bool,
        seed: int,
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> tuple[list[list[int]], Statistics]:
        """Decode `new_tokens` for every prompt with the real loop; an end of text ends nothing.

        Parameters
        ----------
        method : Method
        new_tokens : int
        processors : LogitsProcessorList
        do_sample : bool
            As for `TargetLaw`.
        seed : int
        on_tokens : callable, optional
            As for `specattn.decoding.generate`.

        Returns
        -------
        tokens : list of list of int
            New tokens of every request.
        statistics : Statistics

        Raises
        ------
        ValueError
            The method reads features, which were not kept.
        """
        if method.reads_features and self._features is None:
            raise ValueError(f"{type(method).__name__} reads features: give keep_features=True")
        length = self.prefix + 1
        sequences = Sequences(
            torch.stack(self.prompts),
            [0] * len(self.prompts),
            length + new_tokens + method.max_nodes,
            StoppingCriteriaList([MaxLengthCriteria(length + new_tokens)]),
            self.device,
        )
        law = TargetLaw(processors, do_sample, sequences)
        generator = torch.Generator(self.device).manual_seed(seed)
        self.go_back()
        with self.attached():
            drafter = method.start(self, law, generator)
            statistics = decode(
                self, drafter, law, sequences, generator=generator, on_tokens=on_tokens
            )
        return sequences.padded(0)[:, length:].tolist(), statistics

    def as_dynamic_cache(self) -> DynamicCache:
        """Return the prompts' keys and values as the cache that transformers' `generate` uses."""
        cache = DynamicCache(config=self.model.config)
        for layer in range(self._rows.shape[0]):
            k, v = (x[:, : self.prefix].transpose(1, 2) for x in self._rows[layer])
            cache.update(k, v, layer)
        return cache

    @torch.no_grad()
    def _fill(self, prompts: Sequence[torch.Tensor]) -> None:
        """Prefill, and note the seconds that it took."""
        _finish(self.device)
        start = time.perf_counter()
        with self.attached():
            super().prefill([prompt[:-1] for prompt in prompts], CHUNK_SIZE, None, self._keep)
        _finish(self.device)
        self.prefill_seconds = time.perf_counter() - start
        if len(prompts) > 1:
            self._copy = self._rows[:, :, :, : self.prefix].to("cpu", copy=True)

    def _keep(self, start: int, features: torch.Tensor) -> None:
        if self._features is not None:
            self._features.append((start, features))


def _finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

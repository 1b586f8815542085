"""One model and one prompt, which any method may continue: what generate and compare share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from specattn.cli.loading import (
    decoding_dtype,
    device_named,
    load_model,
    load_tokenizer,
    model_folder,
    read_text,
    silence_transformers,
    versions,
)
from specattn.cli.options import DecodingOptions
from specattn.cli.run_state import RunState, interruptible
from specattn.cli.terminal import console, streamed_text
from specattn.decoding import (
    METHODS,
    ContextualPenalty,
    Method,
    Statistics,
    StopRequest,
    generate,
    parse_method,
)
from specattn.decoding.statistics import distinct

# Sampling options that `generate` takes as they are; the contextual penalty is a processor.
_OF_GENERATE = ("temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty")


def build_method(text: str, option: str) -> Method:
    """Return the method that `option` describes as ``NAME:OPTION=VALUE,...``."""
    try:
        name, given = parse_method(text)
        return METHODS[name](**given)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


@dataclass
class Continuation:
    """What one method made of the prompt."""

    new_tokens: list[int]
    text: str
    finish_reason: str
    statistics: Statistics
    resumed_at: int = 0

    @property
    def distinct(self) -> list[float]:
        """Distinct-1 to Distinct-4: how little the new tokens repeat themselves."""
        return [distinct(self.new_tokens, n) for n in range(1, 5)]

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` writes of it."""
        return {
            "tokens": self.new_tokens,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "resumed_at": self.resumed_at,
            "distinct": self.distinct,
            "statistics": self.statistics.to_dict(),
        }


class DecodingSession:
    """A loaded model with a tokenized prompt.

    Parameters
    ----------
    options : DecodingOptions

    Raises
    ------
    ValueError
        Something is wrong with the options; checked cheapest first.
    """

    def __init__(self, options: DecodingOptions):
        self.options = options
        text = read_text(options.prompt_file, "--prompt-file")
        self.folder = model_folder(options.model)
        device = device_named(options.device)
        dtype = decoding_dtype(options.dtype, device)
        silence_transformers()
        self.tokenizer = load_tokenizer(self.folder)
        self.prompt: list[int] = self.tokenizer(text)["input_ids"][: options.prompt_tokens]
        self.model = load_model(self.folder, dtype, device)
        self._warn_of_length()

    def begin(self, path: Path | None = None, *, resume: bool = False) -> RunState:
        """Return a run that has no tokens yet, or the one that is saved at `path`.

        Raises
        ------
        ValueError
            There is nothing to go on with.
        """
        sampling = self.options.sampling
        settings = {"model": str(self.folder), "dtype": str(self.model.dtype), **sampling}
        generator = torch.Generator(self.model.device).manual_seed(sampling["seed"])
        run = RunState(settings, self.prompt, generator, path)
        if resume:
            run.resume()
            if run.tokens and run.tokens[-1] in self._stop_tokens:
                raise ValueError(f"{path} holds a text that has come to its end")
        return run

    def decode(self, method: Method, run: RunState) -> Continuation:
        """Continue the prompt, with progress on standard error and the text on standard output."""
        options, sampling = self.options, self.options.sampling
        done, wanted = len(run.tokens), options.max_new_tokens
        processors = LogitsProcessorList()
        if options.penalty != 1:
            processors.append(ContextualPenalty(options.penalty_window, options.penalty))
        request = StopRequest()
        with (
            streamed_text(self.tokenizer, len(self.prompt), wanted) as (on_prefill, show),
            interruptible(run, request),
        ):
            if run.tokens:
                show(run.tokens)

            def on_tokens(_: int, tokens: list[int]) -> None:
                show(tokens)
                run.extend(tokens)

            output = generate(
                self.model,
                [self.prompt + run.tokens],
                method,
                max_new_tokens=wanted - done,
                # Of 0 transformers makes a processor that asks for nothing, token by token.
                min_new_tokens=max(0, options.min_new_tokens - done) or None,
                generator=run.generator,
                logits_processor=processors,
                stopping_criteria=StoppingCriteriaList([request]),
                num_pregenerated=done,
                on_prefill=on_prefill,
                on_tokens=on_tokens,
                **{name: sampling[name] for name in _OF_GENERATE},
            )
        run.save()
        stopped = run.tokens[-1] in self._stop_tokens
        cut = request.asked and len(run.tokens) < wanted
        return Continuation(
            run.tokens,
            self.tokenizer.decode(run.tokens, skip_special_tokens=True),
            "stop" if stopped else "interrupted" if cut else "length",
            output.statistics,
            run.resumed_at,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` says of versions, model and prompt."""
        return {
            "versions": versions(),
            "model": {
                "path": str(self.folder),
                "model_type": self.model.config.model_type,
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "device": str(self.model.device),
            },
            "prompt": {"file": str(self.options.prompt_file), "tokens": len(self.prompt)},
        }

    @cached_property
    def _stop_tokens(self) -> set[int]:
        eos = self.model.generation_config.eos_token_id
        return set(eos if isinstance(eos, list) else [] if eos is None else [eos])

    def _warn_of_length(self) -> None:
        """Say that the text may leave the positions that the model was made for."""
        known = self.model.config.max_position_embeddings
        prompt, new = len(self.prompt), self.options.max_new_tokens
        if prompt + new > known:
            console.print(
                f"warning: {prompt} prompt tokens and {new} new ones go beyond the {known} "
                "positions of this model; what it says there may be poor",
                style="yellow",
                soft_wrap=True,
            )

"""One model and its prompts, which any method may continue: what generate and compare share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StopStringCriteria
from transformers.generation import StoppingCriteriaList

from specattn.cli.errors import naming
from specattn.cli.loading import Checkpoint, Prompt, tokenize, versions
from specattn.cli.options import OF_GENERATE, DecodingOptions
from specattn.cli.run_state import RunState, interruptible
from specattn.cli.terminal import say, status, streamed_text, write_line, write_pieces
from specattn.decoding import METHODS, ContextualPenalty, Method, Round, Statistics, generate
from specattn.decoding.methods import parse_method
from specattn.decoding.model.checkpoint import check_ends
from specattn.decoding.model.families import check_length
from specattn.decoding.model.quantised import quantised
from specattn.decoding.passes.proving import prove
from specattn.decoding.text.statistics import distinct
from specattn.distributed.launch import Started
from specattn.pages.authors import EARLIER, Authors, Pieces
from specattn.peak_memory import peak_bytes, reset_peak

# What is obeyed of a checkpoint's generation_config: where a text ends, by these and by stop
# strings. How it is sampled is said by options alone.
_OF_CHECKPOINT = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_method(text: str) -> Method:
    """Return the method that ``--method`` describes as ``NAME:OPTION=VALUE,...``."""
    with naming("--method"):
        name, given = parse_method(text)
        return METHODS[name](**given)


@dataclass
class Text:
    """What one method made of one prompt."""

    tokens: list[int]  # new ones
    text: str
    finish_reason: str
    resumed_at: int = 0

    @property
    def distinct(self) -> list[float]:
        """Distinct-1 to Distinct-4: how little the new tokens repeat themselves."""
        return [distinct(self.tokens, n) for n in range(1, 5)]

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` writes of it."""
        return {**vars(self), "distinct": self.distinct}


@dataclass
class Continuation:
    """What one method made of the prompts."""

    texts: list[Text]  # one for each prompt
    statistics: Statistics
    signal: int | None = None  # the number of the one that ended it
    peak_bytes: int | None = None  # the most memory meanwhile

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each text."""
        return [text.tokens for text in self.texts]

    def authors(self, authors: Authors) -> list[str]:
        """Return the author of every token, text by text."""
        return [
            author
            for text, request in zip(self.texts, self.statistics.requests, strict=True)
            for author in authors.of_text(request.history, text.resumed_at)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` writes of it: the one text's fields, or a list of texts."""
        texts = [text.to_dict() for text in self.texts]
        fields = texts[0] if len(texts) == 1 else {"texts": texts}
        return {**fields, "peak_bytes": self.peak_bytes, "statistics": self.statistics.to_dict()}


@contextmanager
def _left_uncollected() -> Iterator[None]:
    """Keep Python's collector from what is there: a look at half a million objects takes 0.2 s."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class DecodingSession:
    """A loaded model with tokenized `texts`; `silent` keeps texts off the standard output.

    What is wrong with the options is a ValueError, checked cheapest first.
    """

    def __init__(
        self,
        options: DecodingOptions,
        texts: dict[str, str],
        *,
        silent: bool = False,
        started: Started | None = None,
    ):
        self.options, self.silent, self.started = options, silent, started
        self.checkpoint = Checkpoint(options)
        self.tokenizer = self.checkpoint.tokenizer
        self.prompts = tokenize(texts, self.tokenizer, options)
        self.model = self.checkpoint.load(1 if started is None else started.parts)
        if options.quantize is not None:
            with status(f"rounding its weights to {options.quantize}"):
                self.model = quantised(self.model, options.quantize, in_place=True)
        with status("comparing it with its own attention"):
            prove(self.model, trust_family=options.trust_family)
        config = self.model.generation_config
        self._stop_strings = config.stop_strings
        kept = {name: getattr(config, name, None) for name in _OF_CHECKPOINT}
        with naming(f"--model: {self.checkpoint.folder}: generation_config.json"):
            check_ends(self._stop_strings, kept)
        if options.stop:
            if not all(options.stop):
                raise ValueError("--stop: expected text, got none")
            theirs = self._stop_strings or []
            self._stop_strings = [*([theirs] if isinstance(theirs, str) else theirs), *options.stop]
        self.model.generation_config = GenerationConfig(**kept)
        longest = max(len(prompt.tokens) for prompt in self.prompts) + options.max_new_tokens
        check_length(self.model.config, longest - 1)  # the last token is not read
        for prompt in self.prompts:
            self._note(prompt)

    def begin(self, path: Path | None = None, *, resume: bool = False) -> list[RunState]:
        """Return runs that have no tokens yet, one for each prompt, or the one saved at `path`."""
        model = {"model": str(self.checkpoint.folder), "dtype": str(self.model.dtype)}
        settings = model | self.options.sampling
        for name in ("kv_dtype", "quantize", "stop"):
            if (value := getattr(self.options, name)) is not None:
                settings[name] = value
        runs = [RunState(settings, prompt.tokens, path) for prompt in self.prompts]
        if path is not None and len(runs) > 1:
            raise ValueError(f"--state and --resume keep one text, got {len(runs)} prompts")
        if resume:
            (run,) = runs
            run.resume()
            if self._has_ended(run):
                raise ValueError(f"{path} holds a text that has come to its end")
        if self.started is not None and self.started.ranks.rank > 0:
            runs[0].path = None  # the first rank alone saves it
        return runs

    def decode(
        self,
        method: Method,
        runs: list[RunState],
        authors: Authors | None = None,
        quiet: bool = False,
    ) -> Continuation:
        """Continue the prompts; unless `quiet`, print texts, in colours of `authors` if given."""
        if self.checkpoint.is_demo and not quiet:
            say(
                "The model is a demo that has read Python code alone: of other text it makes "
                "nonsense. --model takes yours."
            )
        options, sampling = self.options, self.options.sampling
        done, wanted = len(runs[0].tokens), options.max_new_tokens
        total = sum(len(prompt.tokens) for prompt in self.prompts)
        quiet = quiet or self.silent
        streamed = len(runs) == 1 and not quiet
        text = streamed_text(self.tokenizer, total, wanted * len(runs), quiet=not streamed)
        with text as (on_prefill, show), interruptible(runs) as request, _left_uncollected():
            reset_peak(self.model.device)
            if done:
                show(runs[0].tokens, authors and [authors.style(EARLIER)] * done)

            def on_round(row: int, one: Round) -> None:
                show(one.tokens, authors and list(map(authors.style, authors.of_round(one))))
                runs[row].extend(one.tokens)

            output = generate(
                self.model,
                [run.prompt + run.tokens for run in runs],
                method,
                max_new_tokens=wanted - done,
                # Of 0 transformers makes a processor that asks for nothing, token by token.
                min_new_tokens=max(0, options.min_new_tokens - done) or None,
                seed=runs[0].settings["seed"],
                logits_processor=self.penalty(),
                stopping_criteria=StoppingCriteriaList([request]),
                stop_strings=self._stop_strings,
                tokenizer=self.tokenizer,
                num_pregenerated=done,
                compile=options.compile,
                kv_dtype=options.kv_dtype,
                context_parallel=self.started and self.started.context,
                on_prefill=on_prefill,
                on_round=on_round,
                **{name: sampling[name] for name in OF_GENERATE},
            )
        for run in runs:
            run.save()
        cut = request.asked and any(len(run.tokens) < wanted for run in runs)
        texts = [self._text(run, interrupted=cut) for run in runs]
        signal, peak = request.signal if cut else None, peak_bytes(self.model.device)
        found = Continuation(texts, output.statistics, signal, peak)
        if not streamed and not quiet:
            self.show(found, authors)
        return found

    def show(self, found: Continuation, authors: Authors | None = None) -> None:
        """Print texts, unless silent; each of a batch behind the name of its file."""
        if self.silent:
            return
        requests = found.statistics.requests
        for prompt, text, request in zip(self.prompts, found.texts, requests, strict=True):
            if len(found.texts) > 1:
                say(f"==> {prompt.file} <==")
            if authors is not None:
                styles = [authors.style(author) for author in authors.of_text(request.history)]
                write_pieces(self.pieces(text), styles)
            write_line("" if authors else text.text)

    def pieces(self, text: Text) -> list[str]:
        """Return what each of a text's tokens adds to it."""
        return list(map(Pieces(self.tokenizer).next, text.tokens))

    def penalty(self) -> LogitsProcessorList:
        """Return the penalty on the last tokens, if there is one."""
        window, penalty = self.options.penalty_window, self.options.penalty
        return LogitsProcessorList([] if penalty == 1 else [ContextualPenalty(window, penalty)])

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` says of versions, model, prompts and sampling."""
        limits = {
            name: getattr(self.options, name) for name in ("max_new_tokens", "min_new_tokens")
        }
        prompts = [{"file": one.file, "tokens": len(one.tokens)} for one in self.prompts]
        return {
            "versions": versions(),
            "ranks": 1 if self.started is None else self.started.ranks.size,
            "model": {
                **self.checkpoint.describe(self.model),
                "model_type": self.model.config.model_type,
            },
            **({"prompt": prompts[0]} if len(prompts) == 1 else {"prompts": prompts}),
            "sampling": limits | self.options.sampling,
        }

    def _text(self, run: RunState, *, interrupted: bool) -> Text:
        """Return the text of a run that is over."""
        cut = interrupted and len(run.tokens) < self.options.max_new_tokens
        reason = "stop" if self._has_ended(run) else "interrupted" if cut else "length"
        text = self.tokenizer.decode(run.tokens, skip_special_tokens=True)
        return Text(run.tokens, text, reason, run.resumed_at)

    def _has_ended(self, run: RunState) -> bool:
        """Whether a run's text ends with a token or a string at which texts stop."""
        if not run.tokens:
            return False
        eos = self.model.generation_config.eos_token_id
        at_token = run.tokens[-1] in (eos if isinstance(eos, list) else [eos])
        if at_token or not self._stop_strings:
            return at_token
        found = StopStringCriteria(self.tokenizer, self._stop_strings)
        return bool(found(torch.tensor([run.prompt + run.tokens]), None))

    def _note(self, prompt: Prompt) -> None:
        """Say what is not read, and that the text may leave the positions of the model."""
        known, read = self.model.config.max_position_embeddings, len(prompt.tokens)
        new = self.options.max_new_tokens
        if prompt.dropped:
            where = "end" if self.options.last_tokens is None else "beginning"
            say(f"{read} tokens of {prompt.file} are read, {prompt.dropped} at its {where} are not")
        if read + new > known:
            say(
                f"warning: {read} prompt tokens and {new} new ones go beyond the {known} "
                "positions of this model; what it says there may be poor",
                style="yellow",
            )

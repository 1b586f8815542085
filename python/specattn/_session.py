"""One prompt, one model and a terminal: what the commands of `specattn.cli` share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tokenizers.decoders import DecodeStream
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

import specattn
from specattn._long_run import LongRun, interruptible
from specattn.decoding import (
    FAMILIES,
    ContextualPenalty,
    Method,
    Statistics,
    StopRequest,
    generate,
)
from specattn.decoding.statistics import distinct

# The folder exists in a source checkout alone: a wheel does not carry 15 MB of model.
EMBEDDED_TARGET = Path(specattn.__file__).parents[2] / "examples" / "tiny"
DTYPES = ("auto", "float32", "bfloat16", "float16")
# What transformers calls the settings of the law; the contextual penalty is a processor of ours.
_OF_GENERATE = {"temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty"}


@dataclass
class Run:
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


class Session:
    """A loaded model with a tokenized prompt, ready to be continued by any method.

    Parameters
    ----------
    model : PreTrainedModel
    tokenizer : PreTrainedTokenizerFast
    prompt : list of int
    path, prompt_file : Path
        Where model and prompt came from.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        prompt: list[int],
        path: Path,
        prompt_file: Path,
    ):
        self.model, self.tokenizer, self.prompt = model, tokenizer, prompt
        self.path, self.prompt_file = path, prompt_file
        self.console = Console(stderr=True, highlight=False)

    @classmethod
    def open(
        cls,
        path: Path | None,
        prompt_file: Path,
        prompt_tokens: int | None,
        max_new_tokens: int,
        dtype: str,
        device: str,
    ) -> Session:
        """Check everything that can be wrong, cheapest first, then load.

        Raises
        ------
        ValueError
            A file that cannot be read, an unsupported model, or a prompt beyond its context.
        """
        text = read_text(prompt_file)
        path = model_folder(path)
        chosen_device = device_named(device)
        chosen_dtype = dtype_named(dtype, chosen_device)
        tokenizer = load_tokenizer(path)
        prompt = tokenizer(text)["input_ids"][:prompt_tokens]
        warning = _length_warning(path, len(prompt), max_new_tokens)
        model = load_model(path, chosen_dtype, chosen_device)
        session = cls(model, tokenizer, prompt, path, prompt_file)
        if warning:
            session.console.print(warning, style="yellow", soft_wrap=True)
        return session

    def start(
        self, sampling: dict[str, Any], state: Path | None = None, *, resume: bool = False
    ) -> LongRun:
        """Return a run that has not begun, or one that goes on where `state` ends.

        Raises
        ------
        ValueError
            There is nothing to go on with.
        """
        settings = {"model": str(self.path), "dtype": str(self.model.dtype), **sampling}
        generator = torch.Generator(self.model.device).manual_seed(sampling["seed"])
        run = LongRun(settings, self.prompt, generator, state)
        if resume:
            run.resume()
            if run.tokens and run.tokens[-1] in self._stop_tokens:
                raise ValueError(f"{state} holds a text that has come to its end")
        return run

    def run(
        self, method: Method, run: LongRun, *, max_new_tokens: int, min_new_tokens: int = 0
    ) -> Run:
        """Continue the prompt, with progress on standard error and the text on standard output."""
        options = {name: run.settings[name] for name in run.settings.keys() & _OF_GENERATE}
        if run.settings["penalty"] != 1:
            penalty = ContextualPenalty(run.settings["penalty_window"], run.settings["penalty"])
            options["logits_processor"] = LogitsProcessorList([penalty])
        request, done = StopRequest(), len(run.tokens)
        with (
            self._progress(max_new_tokens) as (on_prefill, show),
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
                max_new_tokens=max_new_tokens - done,
                # Of 0 transformers makes a processor that asks for nothing, token by token.
                min_new_tokens=max(0, min_new_tokens - done) or None,
                generator=run.generator,
                stopping_criteria=StoppingCriteriaList([request]),
                already=done,
                on_prefill=on_prefill,
                on_tokens=on_tokens,
                **options,
            )
        run.save()
        stopped = run.tokens[-1] in self._stop_tokens
        cut = request.asked and len(run.tokens) < max_new_tokens
        return Run(
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
                "path": str(self.path),
                "model_type": self.model.config.model_type,
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "device": str(self.model.device),
            },
            "prompt": {"file": str(self.prompt_file), "tokens": len(self.prompt)},
        }

    def table(self, runs: dict[str, Run]) -> Table:
        """Return the figures of the runs, one column each."""
        table = Table(title=f"{len(self.prompt)} prompt tokens of {self.prompt_file.name}")
        table.add_column()
        for name in runs:
            table.add_column(name, justify="right")
        for label, value in _ROWS:
            table.add_row(label, *(value(run.statistics) for run in runs.values()))
        table.add_row("distinct 1-, 2-, 3-, 4-grams", *(_shares(r.distinct) for r in runs.values()))
        details = [run.statistics.details for run in runs.values()]
        for label in dict.fromkeys(label for own in details for label in own):
            table.add_row(label, *(_detail(own.get(label)) for own in details))
        return table

    @cached_property
    def _stop_tokens(self) -> set[int]:
        eos = self.model.generation_config.eos_token_id
        return set(eos if isinstance(eos, list) else [] if eos is None else [eos])

    @contextmanager
    def _progress(self, max_new_tokens: int) -> Iterator[tuple[Callable, Callable]]:
        """Bars while nothing can be read yet; then the text itself, as it is decided."""
        stream = DecodeStream(skip_special_tokens=True)
        backend_tokenizer = self.tokenizer._tokenizer
        text_is_seen = sys.stdout.isatty()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            prefill = progress.add_task("prefill", total=len(self.prompt))
            decode = progress.add_task("decode", total=max_new_tokens, visible=False)

            def on_prefill(done: int, total: int) -> None:
                progress.update(prefill, completed=done, total=total)

            def show(tokens: list[int]) -> None:
                if text_is_seen:
                    progress.stop()  # a bar and a growing line of text cannot share the screen
                progress.update(prefill, visible=False)
                progress.update(decode, advance=len(tokens), visible=True)
                for token in tokens:
                    sys.stdout.write(stream.step(backend_tokenizer, token) or "")
                sys.stdout.flush()

            yield on_prefill, show
        sys.stdout.write("\n")
        sys.stdout.flush()


def _detail(value: Any) -> str:
    """Return what a method says of its run, as text."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _percent(rate: float) -> str:
    return f"{100 * rate:.0f}%"


def _shares(shares: list[float]) -> str:
    return " ".join(f"{share:.2g}" for share in shares)


def _rates(rates: list[float]) -> str:
    return " ".join(map(_percent, rates)) or "-"


def _split(statistics: Statistics) -> str:
    parts = (statistics.draft_seconds, statistics.target_seconds, statistics.accept_seconds)
    return " / ".join(_percent(part / (statistics.decode_seconds or 1)) for part in parts)


_ROWS: tuple[tuple[str, Callable[[Statistics], str]], ...] = (
    ("tokens/s, without prefill", lambda s: f"{s.tokens_per_second:.1f}"),
    ("new tokens", lambda s: f"{s.total.new_tokens}"),
    ("full passes of the target", lambda s: f"{s.passes}"),
    ("mean acceptance length, with bonus", lambda s: f"{s.total.mean_acceptance_length:.2f}"),
    ("accepted at position 1, 2, ...", lambda s: _rates(s.total.position_rates)),
    ("time: draft / target / accept", _split),
    ("prefill, seconds", lambda s: f"{s.prefill_seconds:.2f}"),
    ("decode, seconds", lambda s: f"{s.decode_seconds:.2f}"),
)


def read_text(path: Path, option: str = "--prompt-file") -> str:
    """Return a file's text; `option` named it."""
    if not path.is_file():
        raise ValueError(f"{option}: {path} is not a file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{option}: {path} is not UTF-8 text") from None
    if not text:
        raise ValueError(f"{option}: {path} is empty")
    return text


def model_folder(path: Path | None, option: str = "--model") -> Path:
    """Return the folder once it is sure that it holds a model that can be decoded."""
    if path is None:
        if not EMBEDDED_TARGET.is_dir():
            raise ValueError(
                "--model is needed: the embedded target comes with the source checkout"
            )
        path = EMBEDDED_TARGET
    if not path.is_dir():
        raise ValueError(f"{option}: {path} is not a folder")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        raise ValueError(f"{option}: {path} has no readable config.json") from None
    if (family := config.get("model_type")) not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{option}: family {family!r} is not supported; expected one of {known}")
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{option}: {path} holds no *.safetensors; other formats are not loaded")
    return path


def _length_warning(path: Path, prompt_tokens: int, max_new_tokens: int) -> str | None:
    """Return what to say where a text may leave the positions that the model was made for."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    known = config["max_position_embeddings"]
    if prompt_tokens + max_new_tokens <= known:
        return None
    return (
        f"warning: {prompt_tokens} prompt tokens and {max_new_tokens} new ones go beyond the "
        f"{known} positions of this model; what it says there may be poor"
    )


def versions() -> dict[str, str]:
    """Return what a file of results says of the software."""
    return {
        "specattn": specattn.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def load_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer; transformers keeps quiet from now on."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def load_model(folder: Path, dtype: torch.dtype | str, device: torch.device) -> PreTrainedModel:
    """Return the folder's model, from safetensors alone."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True
    )
    return model.eval().to(device=device)


def device_named(name: str) -> torch.device:
    """Return the device of a ``--device`` option."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device: {name} cannot be used here: {error}") from None
    return device


def dtype_named(name: str, device: torch.device) -> torch.dtype | str:
    """Return the dtype of a ``--dtype`` option; "auto" may depend on what is stored."""
    if name not in DTYPES:
        raise ValueError(f"--dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    if name == "auto":
        # In 16 bits a pass over several rows may round a near-tie otherwise than one row alone.
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, name)

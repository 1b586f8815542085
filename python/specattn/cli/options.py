"""Options of the commands, each declared once: a field of a dataclass, with its help and limits."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtypes that weights may have, by their short names; options take both."""

OF_GENERATE = ("temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty")
"""Options that decide what is drawn, and that `generate` takes as they are."""

SAMPLING = (*OF_GENERATE, "penalty", "penalty_window", "seed")
"""All options that decide what is drawn; the contextual penalty is a processor."""

METHOD_HELP = (
    "NAME or NAME:OPTION=VALUE,... such as vegas:gamma=4,ratio=0.05; auto takes whatever is "
    "fastest; `specattn methods` lists them."
)


def option(default: Any, help: str, *names: str, **limits: Any) -> Any:
    """Declare a field that is an option; ``...`` as its default means that it must be given."""
    about = {"names": names, "typer": {"help": help, **limits}}
    return field(metadata=about) if default is ... else field(default=default, metadata=about)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of its parameter `options`, a dataclass.

    Those that must be given come first in the help, and a switch has no ``--no-`` twin.
    """
    kinds = get_type_hints(command, include_extras=True)
    chosen = kinds["options"]
    types = get_type_hints(chosen)

    def flat(**given: Any) -> None:
        command(options=chosen(**{name: given.pop(name) for name in types}), **given)

    parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    others = [name for name in kinds if name not in ("options", "return")]
    parameters = [parameter(name, annotation=kinds[name]) for name in others]
    for one in sorted(fields(chosen), key=lambda one: one.default is not MISSING):
        switch = [f"--{one.name.replace('_', '-')}"] if one.default is False else []
        info = typer.Option(*(one.metadata["names"] or switch), **one.metadata["typer"])
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        kind = operator.getitem(Annotated, (types[one.name], info))
        parameters.append(parameter(one.name, default=default, annotation=kind))
    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {one.name: one.annotation for one in parameters}
    return flat


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model, where it runs, and how its tokens are chosen."""

    model: Path | None = option(None, "Hugging Face directory, or tiny-hybrid [default: tiny].")
    dtype: str = option("auto", "fp32, bf16, fp16, or auto: fp32 on a CPU, else as stored.")
    device: str = option("auto", "Torch device, or auto: a GPU where there is one.")
    temperature: float = option(0.0, "0 is greedy decoding.", min=0.0)
    seed: int = option(0, "Seed of the sampling.", min=0, max=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(ModelOptions):
    """What to continue and how, whatever the method."""

    prompt_file: list[Path] = option(..., "UTF-8 text; - is standard input. Repeat it for a batch.")
    max_new_tokens: int = option(128, "Stop after this many new tokens.", min=1, max=2**31 - 1)
    min_new_tokens: int = option(0, "Do not stop before so many.", min=0)
    top_k: int = option(0, "Keep the k best tokens; 0 keeps all.", min=0)
    top_p: float = option(1.0, "Keep this much mass.", min=0.0, max=1.0)
    min_p: float = option(0.0, "Drop tokens below this share of the best one's.", min=0.0, max=1.0)
    eta_cutoff: float = option(
        0.0, "Eta sampling's epsilon, such as 2e-4; 0 is off.", "--eta", min=0.0, max=1.0
    )
    repetition_penalty: float = option(1.0, "Of tokens in the text already; 1 is none.", min=0.01)
    penalty: float = option(1.0, "Of tokens in the last --penalty-window; 1 is none.", min=0.01)
    penalty_window: int = option(1024, "Last tokens that --penalty looks at.", min=1)
    prompt_tokens: int | None = option(None, "Read only the first N tokens of the file.", min=1)
    last_tokens: int | None = option(None, "Read only the last N tokens of the file.", min=1)
    chat: bool = option(False, "The prompt file is a user's message to a chat model.")
    system: str | None = option(None, "System message of --chat.")
    compile: Literal["auto", "on", "off"] = option(
        "auto", "Passes of few rows as kernel calls alone, on a CPU (docs/compiling.md)."
    )
    kv_dtype: Literal["int8", "fp8", "fp8_e5m2"] | None = option(
        None, "Keep keys and values in 8 bits (docs/eight-bits.md)."
    )
    quantize: Literal["int8", "int4", "fp8"] | None = option(
        None, "Round weights to 8 or 4 bits (docs/quantised.md)."
    )
    trust_family: bool = option(False, "Do not compare a model of a tested family first.")
    explain: bool = option(False, "Say by which figures the method decided.")
    json_file: Path | None = option(
        None, "Write tokens, text and statistics here; - is standard output.", "--json"
    )

    @property
    def sampling(self) -> dict[str, Any]:
        """What the text depends on beside the model, as ``--json`` and ``--state`` write it."""
        return {name: getattr(self, name) for name in SAMPLING} | {"min_p": self.min_p or None}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """A training run, whatever its method."""

    target: Path = option(..., "Hugging Face directory with safetensors.")
    data: list[Path] = option(..., "Text or JSONL, files or folders; may be given several times.")
    output: Path = option(..., "Folder of the checkpoints and the drafter.")
    eval_data: list[Path] | None = option(None, "Held-out text, for loss and acceptance length.")
    drafter: Path | None = option(None, "Drafter to go on from [default: a new one].")
    resume: bool = option(False, "Go on from the last checkpoint in --output.")
    row_length: int | None = option(None, "Tokens of a row [default: the preset's].", min=8)
    batch_size: int | None = option(None, "Rows of a step [default: the preset's].", min=1)
    learning_rate: float | None = option(None, "The highest [default: the preset's].", min=0.0)
    muon: float | None = option(None, "Learn matrices by Muon, at this highest rate.", min=0.0)
    text_field: str = option("text", "Key of the text in a line of JSONL.")
    eval_rows: int = option(64, "Rows of held-out text, at most.", min=1)
    eval_prompts: int = option(4, "Held-out texts that evaluation continues.", min=0)
    eval_prompt_tokens: int = option(1024, "Tokens of each.", min=1)
    eval_new_tokens: int = option(128, "How far they are continued.", min=1)
    target_dtype: str = option("auto", "fp32, bf16, fp16, or auto: as stored.")

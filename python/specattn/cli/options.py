"""The options that several commands have, stated once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

ModelOption = Annotated[
    Path | None,
    typer.Option(help="Hugging Face directory with safetensors [default: the embedded target]."),
]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 is greedy decoding.")]
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")]
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtypes that weights may have, by their short names; options take both."""

DtypeOption = Annotated[
    str, typer.Option(help="fp32, bf16, fp16, or auto: fp32 on a CPU, else as stored.")
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json", help="Write tokens, text and statistics here; - is standard output, alone."
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Torch device, or auto: a GPU where there is one.")]


@dataclass(frozen=True)
class DecodingOptions:
    """What to continue and how, whatever the method; the options say what each field means."""

    prompt_file: Annotated[
        list[Path],
        typer.Option(help="UTF-8 text to continue; - is standard input. Repeat it for a batch."),
    ]
    model: ModelOption = None
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many new tokens.")] = (
        128
    )
    min_new_tokens: Annotated[int, typer.Option(min=0, help="Do not stop before so many.")] = 0
    temperature: TemperatureOption = 0.0
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k best tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Keep this much mass.")] = 1.0
    min_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Drop tokens below this share of the best one's."),
    ] = 0.0
    eta: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Eta sampling's epsilon, such as 2e-4; 0 is off."),
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(min=0.01, help="Of tokens that are in the text already; 1 is none.")
    ] = 1.0
    penalty: Annotated[
        float, typer.Option(min=0.01, help="Of tokens in the last --penalty-window; 1 is none.")
    ] = 1.0
    penalty_window: Annotated[
        int, typer.Option(min=1, help="Last tokens that --penalty looks at.")
    ] = 1024
    seed: SeedOption = 0
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Read only the first N tokens of the prompt file.")
    ] = None
    last_tokens: Annotated[
        int | None, typer.Option(min=1, help="Read only the last N tokens of the prompt file.")
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt file is a user's message to a chat model.")
    ] = False
    system: Annotated[str | None, typer.Option(help="System message of --chat.")] = None
    dtype: DtypeOption = "auto"
    device: DeviceOption = "auto"
    compile: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(
            help="Passes of few rows as kernel calls alone, on a CPU (docs/compiling.md)."
        ),
    ] = "auto"
    trust_family: Annotated[
        bool,
        typer.Option("--trust-family", help="Do not compare a model of a tested family first."),
    ] = False

    @property
    def sampling(self) -> dict[str, Any]:
        """What the text depends on beside the model, as ``--json`` and ``--state`` write it."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p or None,
            "eta_cutoff": self.eta,
            "repetition_penalty": self.repetition_penalty,
            "penalty": self.penalty,
            "penalty_window": self.penalty_window,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class TrainingOptions:
    """A training run, whatever its method; the options say what each field means."""

    target: Annotated[Path, typer.Option(help="Hugging Face directory with safetensors.")]
    data: Annotated[
        list[Path],
        typer.Option(help="Text or JSONL, files or folders; may be given several times."),
    ]
    output: Annotated[Path, typer.Option(help="Folder of the checkpoints and the drafter.")]
    eval_data: Annotated[
        list[Path] | None, typer.Option(help="Held-out text, for loss and acceptance length.")
    ] = None
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter to go on from [default: a new one].")
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --output.")
    ] = False
    row_length: Annotated[
        int | None, typer.Option(min=8, help="Tokens of a row [default: the preset's].")
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of an optimizer step [default: the preset's].")
    ] = None
    learning_rate: Annotated[
        float | None, typer.Option(min=0.0, help="The highest [default: the preset's].")
    ] = None
    text_field: Annotated[str, typer.Option(help="Key of the text in a line of JSONL.")] = "text"
    eval_rows: Annotated[int, typer.Option(min=1, help="Rows of held-out text, at most.")] = 64
    eval_prompts: Annotated[
        int, typer.Option(min=0, help="Held-out texts that evaluation continues.")
    ] = 4
    eval_prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 1024
    eval_new_tokens: Annotated[int, typer.Option(min=1, help="How far they are continued.")] = 128
    target_dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: as stored.")] = (
        "auto"
    )


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `options`, a dataclass, by one option for each of its fields.

    Typer reads options from the signature of what is returned.
    """
    hints = get_type_hints(command, include_extras=True)
    kind = hints["options"]
    kind_hints = get_type_hints(kind, include_extras=True)

    def flat(**given: Any) -> None:
        options = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(options=options, **given)

    parameters = [_parameter(field, kind_hints[field.name]) for field in fields(kind)]
    parameters += [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "options"
    ]
    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {one.name: one.annotation for one in parameters}
    return flat


def _parameter(field: Field, hint: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )

"""The options that every ``specattn train`` command has, stated once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


@dataclass(frozen=True)
class Plan:
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
        float | None, typer.Option(help="The highest [default: the preset's].")
    ] = None
    text_field: Annotated[str, typer.Option(help="Key of the text in a line of JSONL.")] = "text"
    eval_rows: Annotated[int, typer.Option(min=1, help="Rows of held-out text, at most.")] = 64
    eval_prompts: Annotated[
        int, typer.Option(min=0, help="Held-out texts that evaluation continues.")
    ] = 4
    eval_prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 1024
    eval_new_tokens: Annotated[int, typer.Option(min=1, help="How far they are continued.")] = 128
    target_dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: as stored.")
    ] = "auto"


def with_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Plan` in place of its parameter `plan`."""

    def flat(**given: Any) -> None:
        command(plan=Plan(**{field.name: given.pop(field.name) for field in fields(Plan)}), **given)

    # Typer reads options from the signature: `plan` opens out into one parameter per field.
    hints = get_type_hints(Plan, include_extras=True)
    options = [_option(field, hints[field.name]) for field in fields(Plan)]
    own_hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=own_hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "plan"
    ]
    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__signature__ = inspect.Signature([*options, *own])  # type: ignore[attr-defined]
    flat.__annotations__ = {option.name: option.annotation for option in [*options, *own]}
    return flat


def _option(field: Field, hint: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )

"""Options of the commands, each declared once: a field of a dataclass, with its help and limits."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtypes that weights may have, by their short names; options take both."""

OF_GENERATE = ("temperature", "top_k", "top_p", "min_p", "eta_cutoff", "repetition_penalty")
"""Options that decide what is drawn, and that `generate` takes as they are."""

SAMPLING = (*OF_GENERATE, "penalty", "penalty_window", "seed")
"""All options that decide what is drawn; the contextual penalty is a processor."""

METHOD_HELP = (
    "A name, or name:option=value,... such as vegas:gamma=4,ratio=0.05; auto decides before each "
    "round by what paid; `specattn methods` lists them."
)

_GROUPS = (None, "Prompt", "Method", "Model", "Sampling", "Output", "Ranks")
_LETTERS = {int: "N", float: "X", Path: "FILE", str: "TEXT"}


class _Named:
    """A command whose help says in words what values are, and names no type of Python."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # type: ignore[misc]
        for one in params:
            if one.param_type_name == "argument":  # whose name says it
                one.display_type_rich = lambda ctx: None
            elif one.is_flag and one.metavar is None:
                one.metavar = ""
        return params


class _Command(_Named, TyperCommand):
    """One command."""


class _Group(_Named, TyperGroup):
    """Several."""


class App(typer.Typer):
    """Commands of ours; without one of them there is help."""

    def __init__(self, **given: Any):
        looks: dict[str, Any] = {"rich_markup_mode": "rich", "add_completion": False}
        super().__init__(cls=_Group, no_args_is_help=True, **looks, **given)

    def command(self, name: str | None = None, **given: Any) -> Callable[..., Any]:
        """Return what adds a command."""
        return super().command(name, cls=_Command, **given)


def option(default: Any, help: str, *names: str, group: str | None = None, **limits: Any) -> Any:
    """Declare a field that is an option; ``...`` as its default means that it must be given.

    `group` is the heading in the help that it stands under.
    """
    if limits.get("max", 0) >= 2**31 - 1:  # no bound that a reader wants to see
        limits["callback"] = at_most(limits.pop("max"))
    # Brackets are markup there.
    text = {"help": help.replace("[", r"\["), "rich_help_panel": group}
    about = {"names": names, "typer": text | limits}
    return field(metadata=about) if default is ... else field(default=default, metadata=about)


def grouped(group: str) -> Callable[..., Any]:
    """Return `option` for one group."""
    return partial(option, group=group)


def metavar(kind: Any) -> str | None:
    """Return what stands for a value of a type in the help; nothing for a switch."""
    if kind is bool or bool in get_args(kind):
        return ""
    inner = (metavar(one) for one in get_args(kind))
    return _LETTERS.get(kind) or next((one for one in inner if one), None)


def at_most(most: int) -> Callable[[Any], Any]:
    """Return what refuses a number above `most`, which the help does not show."""

    def check(value: int | None) -> int | None:
        if value is not None and value > most:
            raise typer.BadParameter(f"{value} is more than {most}")
        return value

    return check


def _place(one: Field[Any]) -> tuple[bool, int]:
    group = one.metadata["typer"]["rich_help_panel"]
    return one.default is not MISSING, _GROUPS.index(group)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of its parameter `options`, a dataclass.

    Those that must be given come first in the help, then group by group, and a switch has no
    ``--no-`` twin.
    """
    kinds = get_type_hints(command, include_extras=True)
    chosen = kinds["options"]
    types = get_type_hints(chosen)

    def flat(**given: Any) -> None:
        command(options=chosen(**{name: given.pop(name) for name in types}), **given)

    parameter = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    others = [name for name in kinds if name not in ("options", "return")]
    parameters = [parameter(name, annotation=kinds[name]) for name in others]
    for one in sorted(fields(chosen), key=_place):
        switch = [f"--{one.name.replace('_', '-')}"] if one.default is False else []
        about = {"metavar": metavar(types[one.name])} | one.metadata["typer"]
        info = typer.Option(*(one.metadata["names"] or switch), **about)
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        kind = operator.getitem(Annotated, (types[one.name], info))
        parameters.append(parameter(one.name, default=default, annotation=kind))
    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {one.name: one.annotation for one in parameters}
    return flat


_model, _sampling = grouped("Model"), grouped("Sampling")
_prompt, _output = grouped("Prompt"), grouped("Output")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model, where it runs, and how its tokens are chosen."""

    model: str | None = _model(
        None,
        "Folder in Hugging Face layout, a Hub id such as Qwen/Qwen3-0.6B, or tiny-hybrid "
        "[default: tiny, a demo model].",
        metavar="DIR|HUB_ID",
    )
    dtype: str = _model(
        "auto", "fp32, bf16, fp16, or auto: fp32 on a CPU, else as stored.", metavar="DTYPE"
    )
    device: str = _model(
        "auto", "Torch device, or auto: a GPU where there is one.", metavar="DEVICE"
    )
    temperature: float = _sampling(0.0, "0 is greedy decoding.", min=0.0)
    seed: int = _sampling(0, "Seed of the sampling.", min=0, max=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(ModelOptions):
    """What to continue and how, whatever the method."""

    prompt: list[str] | None = _prompt(None, "Text to continue. Repeat it for a batch.")
    prompt_file: list[Path] | None = _prompt(
        None, "UTF-8 text; - is standard input. Repeat it for a batch."
    )
    prompt_tokens: int | None = _prompt(None, "Read only the first N tokens.", min=1)
    last_tokens: int | None = _prompt(None, "Read only the last N tokens.", min=1)
    chat: bool = _prompt(False, "The prompt is a user's message to a chat model.")
    system: str | None = _prompt(None, "System message of --chat.")
    max_new_tokens: int = _prompt(128, "Stop after this many new tokens.", min=1, max=2**31 - 1)
    min_new_tokens: int = _prompt(0, "Do not stop before so many.", min=0)
    stop: list[str] | None = _prompt(None, "Stop behind this text. Repeatable.")
    top_k: int = _sampling(0, "Keep the N likeliest tokens; 0 keeps all.", min=0)
    top_p: float = _sampling(
        1.0, "Keep the likeliest tokens that have this probability together.", min=0.0, max=1.0
    )
    min_p: float = _sampling(
        0.0, "Drop tokens less likely than this share of the likeliest.", min=0.0, max=1.0
    )
    eta_cutoff: float = _sampling(
        0.0, "Eta sampling's epsilon, such as 2e-4; 0 is off.", "--eta", min=0.0, max=1.0
    )
    repetition_penalty: float = _sampling(
        1.0, "Makes tokens that the text has already less likely; 1 is off.", min=0.01
    )
    penalty: float = _sampling(
        1.0, "The same for tokens among the last --penalty-window; 1 is off.", min=0.01
    )
    penalty_window: int = _sampling(1024, "How many of the last tokens --penalty looks at.", min=1)
    compile: Literal["auto", "on", "off"] = _model(
        "auto", "Run passes of few rows as kernel calls alone, on a CPU (docs/compiling.md)."
    )
    kv_dtype: Literal["int8", "fp8", "fp8_e5m2"] | None = _model(
        None, "Keep keys and values in 8 bits (docs/eight-bits.md)."
    )
    quantize: Literal["int8", "int4", "fp8"] | None = _model(
        None, "Round weights to 8 or 4 bits (docs/quantised.md)."
    )
    trust_family: bool = _model(
        False, "Skip comparing a model of a tested family with its own attention."
    )
    explain: bool = _output(
        False, "Say where the time went, and by which figures the method decided."
    )
    json_file: Path | None = _output(
        None, "Write tokens, text and statistics here; - is standard output.", "--json"
    )

    @property
    def unusual_sampling(self) -> list[str]:
        """What is not as it is by default of that on which the text depends, in words."""
        usual = {one.name: one.default for one in fields(self)}
        given = {name: getattr(self, name) for name in SAMPLING}
        return [f"{name} {x}".replace("_", " ") for name, x in given.items() if x != usual[name]]

    @property
    def sampling(self) -> dict[str, Any]:
        """What the text depends on beside the model, as ``--json`` and ``--state`` write it."""
        return {name: getattr(self, name) for name in SAMPLING} | {"min_p": self.min_p or None}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """A training run, whatever its method."""

    target: str = option(..., "Folder in Hugging Face layout, or a Hub id.", metavar="DIR|HUB_ID")
    data: list[Path] = option(..., "Text or JSONL, files or folders; may be given several times.")
    output: Path = option(..., "Folder of the checkpoints and the drafter.", metavar="DIR")
    eval_data: list[Path] | None = option(None, "Held-out text, for loss and acceptance length.")
    drafter: Path | None = option(
        None, "Drafter to go on from [default: a new one].", metavar="DIR"
    )
    resume: bool = option(False, "Go on from the last checkpoint in --output.")
    row_length: int | None = option(None, "Tokens of a row [default: the preset's].", min=8)
    batch_size: int | None = option(None, "Rows of a step [default: the preset's].", min=1)
    learning_rate: float | None = option(None, "The highest [default: the preset's].", min=0.0)
    muon: float | None = option(None, "Learn matrices by Muon, at this highest rate.", min=0.0)
    patience: int | None = option(
        None, "Stop after N evaluations without a lower loss, and keep the best weights.", min=1
    )
    text_field: str = option("text", "Key of the text in a line of JSONL.")
    eval_rows: int = option(64, "Rows of held-out text, at most.", min=1)
    eval_prompts: int = option(4, "Held-out texts that evaluation continues.", min=0)
    eval_prompt_tokens: int = option(1024, "Tokens of each.", min=1)
    eval_new_tokens: int = option(128, "How far they are continued.", min=1)
    target_dtype: str = option("auto", "fp32, bf16, fp16, or auto: as stored.")

"""``specattn methods``: what ``--method`` takes."""

from __future__ import annotations

from typing import Annotated

import typer

from specattn.cli.errors import naming, one_of
from specattn.cli.terminal import preload, write_line
from specattn.method_names import method_names


def methods(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Of these alone.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Say which drafters lie in a model's folder, and no options.",
            metavar="DIR|HUB_ID",
        ),
    ] = None,
) -> None:
    """List the methods and their options, as --method takes them, with types and defaults."""
    named = [one_of("NAME", name, method_names()) for name in names or ()]
    preload("specattn.decoding")
    from specattn.decoding import METHODS
    from specattn.decoding.methods.spelling import options_of

    named = named or [*METHODS]
    if model is not None:
        _list_drafters(named, model)
        return
    for name in named:
        write_line(name)
        for option, spelled in options_of(METHODS[name]).items():
            write_line(f"  {option}={spelled.default_text:<{22 - len(option)}} {spelled.takes}")


def _list_drafters(names: list[str], model: str) -> None:
    """Write of every method with a trained drafter where it lies in a model's folder."""
    from transformers import AutoConfig

    from specattn.cli.loading import model_folder
    from specattn.decoding import METHODS
    from specattn.decoding.drafting.trained import Trained

    with naming("--model"):
        folder = model_folder(model)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        depth = config.get_text_config(decoder=True).num_hidden_layers
        for name in names:
            method = METHODS[name]
            if issubclass(method, Trained):
                write_line(f"{name:<12} {method.offered(folder, depth) or 'none'}")

"""``specattn quantize``: a model with the weights of its layers in 8 or 4 bits, stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specattn.cli.errors import naming
from specattn.cli.terminal import preload, status, write_line

_KINDS = ("int4", "int8", "fp8")


def quantize(
    model: Annotated[
        str,
        typer.Argument(
            help="Model: a folder, a Hub id, tiny or tiny-hybrid.", metavar="DIR|HUB_ID"
        ),
    ],
    output: Annotated[Path, typer.Argument(help="New folder.", metavar="DIR")],
    int4: Annotated[bool, typer.Option("--int4", help="Integers of 4 bits, in groups.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Integers of 8 bits, in groups.")] = False,
    fp8: Annotated[bool, typer.Option("--fp8", help="Floats of 8 bits (e4m3), by row.")] = False,
) -> None:
    """Store a model with the weights of its layers rounded, for this package, vLLM and others."""
    kinds = [kind for kind, given in zip(_KINDS, (int4, int8, fp8), strict=True) if given]
    if len(kinds) != 1:
        wanted = ", ".join(f"--{kind}" for kind in _KINDS)
        got = " and ".join(f"--{kind}" for kind in kinds) or "none"
        raise ValueError(f"expected one of {wanted}, got {got}")
    preload("specattn.decoding.model.store")
    from specattn.cli.loading import model_folder
    from specattn.decoding.model.store import store_rounded

    folder = model_folder(model, "MODEL")
    if output.exists():
        raise ValueError(f"OUTPUT: {output} exists, and is not replaced")
    if not (parent := output.absolute().parent).is_dir():
        raise ValueError(f"OUTPUT: {parent} is not a folder")
    with status(f"rounding {folder}"), naming("MODEL", Exception):
        found = store_rounded(folder, output, kinds[0])
    rest = found.before - found.layers_before
    write_line(
        f"{output}: {found.after / 1e9:.3g} GB, of {found.before / 1e9:.3g}: {found.layers} layers "
        f"in {kinds[0]}, {found.layers_after / 1e9:.3g} GB of {found.layers_before / 1e9:.3g}, "
        f"and {rest / 1e9:.3g} GB as they were"
    )
    write_line(f"specattn generate --model {output} --prompt-file FILE")

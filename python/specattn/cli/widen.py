"""``specattn widen``: a small model in the sizes of a real one, computing what it computed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specattn.cli.errors import naming, one_of
from specattn.cli.table import aligned, fitting
from specattn.cli.terminal import preload, room, write_line

_SIZES = "name", "layers", "hidden", "q_heads", "kv_heads", "head_dim", "intermediate", "vocab"


def widen(
    source: Annotated[
        str,
        typer.Argument(
            help="Model: a folder, a Hub id, tiny or tiny-hybrid.", metavar="DIR|HUB_ID"
        ),
    ],
    output: Annotated[
        Path, typer.Argument(help="New folder, of the model and its drafters.", metavar="DIR")
    ],
    like: Annotated[
        str, typer.Option(help="Whose sizes to come close to.", metavar="NAME")
    ] = "qwen3-0.6b",
    layers: Annotated[
        int | None, typer.Option(help=r"Of the new model \[default: as many].", metavar="N", min=1)
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.", metavar="DTYPE")] = "bfloat16",
) -> None:
    """Give a model and its drafters the sizes of a real one, without changing what they compute."""
    preload("specattn.widening")
    import torch
    from transformers.utils import logging

    from specattn import widening
    from specattn.cli.loading import load_tokenizer, model_folder
    from specattn.planning import MODELS, ModelShape

    real = MODELS[one_of("--like", like, [x.name for x in MODELS.values() if not x.experts])]
    one_of("--dtype", dtype, ("bfloat16", "float32"))
    folder = model_folder(source, "SOURCE")
    logging.disable_progress_bar()
    with naming("SOURCE", Exception):
        small = widening.Source.load(folder, load_tokenizer(folder))
    own = ModelShape.from_config(folder)
    with naming("--layers" if layers and layers < own.layers else "--like"):
        times = widening.Multiples.towards(replace(real, layers=layers or real.layers), own)
    with naming("OUTPUT"):
        found = widening.widen(small, output, times, getattr(torch, dtype))
    rows = [
        {name: str(getattr(shape, name)) for name in _SIZES}
        | {"parameters": f"{shape.weights_stored() / 1e6:.0f} M"}
        for shape in (ModelShape.from_config(output), real)
    ]
    write_line("\n".join(aligned(fitting(rows, _SIZES[::-1][:-1], room(sys.stdout)))))
    size = sum(file.stat().st_size for file in output.rglob("*.safetensors"))
    write_line(f"{output}: {size / 1e9:.2f} GB, with drafters: {', '.join(found.trees) or 'none'}")
    trees = ", ".join(f"{count} of {name}" for name, count in found.trees.items())
    write_line(
        f"float32: logits of {found.tokens} tokens differ by {found.difference:.1g}, of up to "
        f"{found.largest:.3g}; the same drafted trees: {trees or 'no drafter'}"
    )
    write_line(f"{dtype}, as stored: the same next token behind {found.same_tokens:.1%} of them")

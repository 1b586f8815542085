"""``specattn train``: train a drafter for one's own target, one sub-command per method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specattn.cli.errors import one_line_errors
from specattn.cli.options import TrainingOptions, with_options

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train a drafter for a frozen target.",
)

NumHeads = Annotated[int, typer.Option("--heads", min=1, help="Heads of a new drafter.")]

# What is not an option of ours is one of transformers' trainer, which has some hundred.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_PASS_ON)
@with_options
def longspec(
    context: typer.Context,
    options: TrainingOptions,
    stage: Annotated[
        str, typer.Option(help="Preset of the paper: short, long or finetune.")
    ] = "short",
    anchor_offset: Annotated[
        bool | None,
        typer.Option("--anchor-offset/--plain-positions", help="[default: the stage's]"),
    ] = None,
    levels: Annotated[
        int,
        typer.Option(min=1, help="Drafted tokens per path; 1 trains without flash noise."),
    ] = 5,
    window: Annotated[
        int, typer.Option(min=1, help="Positions that the drafter's self attention reaches.")
    ] = 512,
) -> None:
    """Train LongSpec's drafter; all other options go to transformers' TrainingArguments.

    For example --per_device_train_batch_size 4 --max_steps 1000 --bf16 True --save_steps 200
    --deepspeed zero1.json --fsdp full_shard. Several processes: torchrun -m specattn.cli train ...
    """
    with one_line_errors():
        from specattn.cli.training_run import TrainingRun
        from specattn.training import STAGES, LongSpecRecipe

        if stage not in STAGES:
            raise ValueError(f"--stage: expected one of {', '.join(STAGES)}, got {stage!r}")
        preset = STAGES[stage]
        if anchor_offset is not None:
            preset = replace(preset, anchor_offset=anchor_offset)
        recipe = LongSpecRecipe(preset, levels=levels, window=window)
        run = TrainingRun(options, recipe, context.args)
    run.train()


@app.command(context_settings=_PASS_ON)
@with_options
def tokenswift(context: typer.Context, options: TrainingOptions, num_heads: NumHeads = 3) -> None:
    """Train TokenSwift's chained heads; other options go to transformers' TrainingArguments.

    The defaults are the paper's table 9: 200 steps of 120 rows of 8192 tokens.
    """
    with one_line_errors():
        from specattn.cli.training_run import TrainingRun
        from specattn.training import TokenSwiftRecipe

        run = TrainingRun(options, TokenSwiftRecipe(num_heads), context.args)
    run.train()


@app.command(context_settings=_PASS_ON)
@with_options
def medusa(context: typer.Context, options: TrainingOptions, num_heads: NumHeads = 3) -> None:
    """Train Medusa's independent heads; other options go to transformers' TrainingArguments.

    The defaults are those of TokenSwift's heads, so that the two can be compared.
    """
    with one_line_errors():
        from specattn.cli.training_run import TrainingRun
        from specattn.training import MedusaRecipe

        run = TrainingRun(options, MedusaRecipe(num_heads), context.args)
    run.train()


@app.command(context_settings=_PASS_ON)
@with_options
def poss(
    context: typer.Context,
    options: TrainingOptions,
    variant: Annotated[
        str, typer.Option(help="Preset of the paper: eagle-2, hass, poss-1, poss-2 or poss-3.")
    ] = "poss-2",
    positions_per_layer: Annotated[
        int | None,
        typer.Option(min=1, help="Positions of each specialist [default: the variant's]."),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens drafted behind each token [default: the variant's]."),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(help="Drafter that a new one begins as [default: the target's last layer]."),
    ] = None,
    feature_weight: Annotated[float, typer.Option(help="Of the smooth L1 loss.")] = 1.0,
    token_weight: Annotated[float, typer.Option(help="Of the cross entropy.")] = 0.1,
    fc_norm: Annotated[
        bool, typer.Option("--fc-norm", help="Norm features before fc, as EAGLE 3.1.")
    ] = False,
    norm_output: Annotated[
        bool, typer.Option("--norm-output", help="Norm drafted features, as EAGLE 3.1.")
    ] = False,
    feature_cache: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the target's features [default: computed anew]."),
    ] = None,
) -> None:
    """Train PosS', EAGLE-2's or HASS' drafter; other options go to transformers' trainer.

    The variants start from an EAGLE drafter: train eagle-2 first, and give it as --start.
    """
    with one_line_errors():
        from specattn.cli.training_run import TrainingRun
        from specattn.training import VARIANTS, PosSRecipe

        if variant not in VARIANTS:
            raise ValueError(f"--variant: expected one of {', '.join(VARIANTS)}, got {variant!r}")
        own = {"positions_per_layer": positions_per_layer, "depth": depth}
        given = {name: value for name, value in own.items() if value is not None}
        recipe = PosSRecipe(
            replace(VARIANTS[variant], **given),
            feature_weight=feature_weight,
            token_weight=token_weight,
            fc_norm=fc_norm,
            norm_output=norm_output,
            start=start,
            feature_cache=feature_cache,
        )
        run = TrainingRun(options, recipe, context.args)
    run.train()

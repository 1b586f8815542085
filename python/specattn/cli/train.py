"""``specattn train``: train a drafter for one's own target, one sub-command per method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from specattn.cli.errors import numbers, one_line_errors, one_of
from specattn.cli.options import App, TrainingOptions, option, takes_options
from specattn.cli.terminal import preload

app = App(help="Train a drafter for a frozen target.")

# What is not an option of ours is one of transformers' trainer, which has some hundred.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@dataclass(frozen=True, kw_only=True)
class LongSpecOptions(TrainingOptions):
    """Training LongSpec's drafter."""

    stage: str = option("short", "Preset of the paper: short, long or finetune.")
    anchor_offset: bool | None = option(
        None, "[default: the stage's]", "--anchor-offset/--plain-positions"
    )
    levels: int = option(5, "Drafted tokens per path; 1 trains without flash noise.", min=1)
    window: int = option(512, "Positions that the drafter's self attention reaches.", min=1)


@dataclass(frozen=True, kw_only=True)
class HeadsOptions(TrainingOptions):
    """Training heads on the target's hidden states."""

    num_heads: int = option(3, "Heads of a new drafter.", "--heads", min=1)


@dataclass(frozen=True, kw_only=True)
class PosSOptions(TrainingOptions):
    """Training PosS', EAGLE-2's or HASS' drafter."""

    variant: str = option("poss-2", "Preset of the paper: eagle-2, hass, poss-1, poss-2 or poss-3.")
    positions_per_layer: int | None = option(
        None, "Of a specialist [default: the variant's].", min=1
    )
    depth: int | None = option(None, "Drafted tokens [default: the variant's].", min=1)
    start: Path | None = option(None, "Drafter to begin as [default: the target's last layer].")
    feature_weight: float = option(1.0, "Of the smooth L1 loss.")
    token_weight: float = option(0.1, "Of the cross entropy.")
    fc_norm: bool = option(False, "Norm features before fc, as EAGLE 3.1.")
    norm_output: bool = option(False, "Norm drafted features, as EAGLE 3.1.")
    feature_cache: Path | None = option(None, "Folder to keep the target's features in.")


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(TrainingOptions):
    """Training EAGLE-3's drafter."""

    depth: int = option(7, "Drafted tokens, each on the one before.", min=1)
    feature_layers: str | None = option(
        None,
        "Behind how many layers features are taken [default: 2, half, all but 3].",
    )
    draft_vocab_size: int | None = option(None, "Tokens of its head [default: all].", min=1)
    token_heads: int = option(0, "KV heads beside those of the target's last layer.", min=0)
    norm_before_residual: bool = option(False, "Let the residual stream begin as the normed g.")
    fc_norm: bool = option(False, "Norm features before fc, as EAGLE 3.1.")
    norm_output: bool = option(False, "Norm drafted hidden states, as EAGLE 3.1.")


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(TrainingOptions):
    """Training DFlash's drafter, or a causal one."""

    causal: bool = option(False, "Rows of a block see no later ones.", "--causal/--bidirectional")
    layers: int = option(5, "Of a new drafter.", min=1)
    block_size: int = option(16, "Rows of a block, the root's included.", min=2, max=64)
    anchors: int = option(512, "Blocks of a row.", min=1)
    feature_layers: str | None = option(
        None, "Behind how many layers features are taken [default: five, spread evenly]."
    )
    mask_token_id: int | None = option(None, "[default: the last of the vocabulary]", min=0)


@dataclass(frozen=True, kw_only=True)
class MtpOptions(TrainingOptions):
    """Training an MTP head."""

    depth: int = option(4, "Drafted tokens, each on the one before.", min=1)


def _train(context: typer.Context, options: TrainingOptions, recipe: Callable[[Any], Any]) -> None:
    """Train by what `recipe` makes of the module `specattn.training`, or refuse the options."""
    with one_line_errors():
        preload("specattn.training")
        from specattn import training
        from specattn.cli.training_run import TrainingRun

        run = TrainingRun(options, recipe(training), context.args)
    run.train()


def _preset(name: str, presets: dict[str, Any], option: str, **changes: Any) -> Any:
    """Return the preset that `option` names, with the changes that are not None."""
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(presets[one_of(option, name, presets)], **given)


@app.command(context_settings=_PASS_ON)
@takes_options
def longspec(context: typer.Context, options: LongSpecOptions) -> None:
    """Train LongSpec's drafter; all other options go to transformers' TrainingArguments.

    For example --per_device_train_batch_size 4 --max_steps 1000 --bf16 True --save_steps 200
    --deepspeed zero1.json --fsdp full_shard. Several processes: torchrun -m specattn.cli train ...
    """

    def recipe(training: Any) -> Any:
        offset = options.anchor_offset
        stage = _preset(options.stage, training.STAGES, "--stage", anchor_offset=offset)
        return training.LongSpecRecipe(stage, levels=options.levels, window=options.window)

    _train(context, options, recipe)


@app.command(context_settings=_PASS_ON)
@takes_options
def tokenswift(context: typer.Context, options: HeadsOptions) -> None:
    """Train TokenSwift's chained heads; other options go to transformers' TrainingArguments.

    The defaults are the paper's table 9: 200 steps of 120 rows of 8192 tokens.
    """
    _train(context, options, lambda training: training.TokenSwiftRecipe(options.num_heads))


@app.command(context_settings=_PASS_ON)
@takes_options
def medusa(context: typer.Context, options: HeadsOptions) -> None:
    """Train Medusa's independent heads; other options go to transformers' TrainingArguments.

    The defaults are those of TokenSwift's heads, so that the two can be compared.
    """
    _train(context, options, lambda training: training.MedusaRecipe(options.num_heads))


@app.command(context_settings=_PASS_ON)
@takes_options
def poss(context: typer.Context, options: PosSOptions) -> None:
    """Train PosS', EAGLE-2's or HASS' drafter; other options go to transformers' trainer.

    The variants start from an EAGLE drafter: train eagle-2 first, and give it as --start.
    """
    own = "feature_weight", "token_weight", "fc_norm", "norm_output", "start", "feature_cache"

    def recipe(training: Any) -> Any:
        size = {name: getattr(options, name) for name in ("positions_per_layer", "depth")}
        variant = _preset(options.variant, training.VARIANTS, "--variant", **size)
        return training.PosSRecipe(variant, **{name: getattr(options, name) for name in own})

    _train(context, options, recipe)


@app.command(context_settings=_PASS_ON)
@takes_options
def eagle3(context: typer.Context, options: Eagle3Options) -> None:
    """Train EAGLE-3's drafter on what it drafts; other options go to transformers' trainer."""
    own = "draft_vocab_size", "token_heads", "norm_before_residual", "fc_norm", "norm_output"

    def recipe(training: Any) -> Any:
        given = {name: getattr(options, name) for name in own}
        if options.feature_layers is not None:
            given["feature_layers"] = numbers("--feature-layers", options.feature_layers)
        preset = replace(training.EAGLE3_PRESET, depth=options.depth)
        return training.Eagle3Recipe(preset, **given)

    _train(context, options, recipe)


@app.command(context_settings=_PASS_ON)
@takes_options
def dflash(context: typer.Context, options: DFlashOptions) -> None:
    """Train DFlash's drafter, or JetFlow's (--causal); other options go to transformers' trainer.

    The former learns the text's own tokens, the latter the target's distribution.
    """
    own = "causal", "layers", "block_size", "mask_token_id"

    def recipe(training: Any) -> Any:
        given = {name: getattr(options, name) for name in own}
        if options.feature_layers is not None:
            given["feature_layers"] = numbers("--feature-layers", options.feature_layers)
        preset = replace(training.DFLASH_PRESET, anchors=options.anchors)
        return training.DFlashRecipe(preset, **given)

    _train(context, options, recipe)


@app.command(context_settings=_PASS_ON)
@takes_options
def mtp(context: typer.Context, options: MtpOptions) -> None:
    """Train an MTP head for a target without one; other options go to transformers' trainer.

    It begins as the target's last layer, and drafts on what it has drafted itself.
    """

    def recipe(training: Any) -> Any:
        return training.MtpRecipe(replace(training.MTP_PRESET, depth=options.depth))

    _train(context, options, recipe)

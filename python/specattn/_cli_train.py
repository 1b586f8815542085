"""``specattn train``: train a drafter for one's own target, one sub-command per method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specattn._cli_errors import one_line_errors

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train a drafter for a frozen target.",
)

# What is not an option of ours is one of transformers' trainer, which has some hundred.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_PASS_ON)
def longspec(
    context: typer.Context,
    target: Annotated[Path, typer.Option(help="Hugging Face directory with safetensors.")],
    data: Annotated[
        list[Path],
        typer.Option(help="Text or JSONL, files or folders; may be given several times."),
    ],
    output: Annotated[Path, typer.Option(help="Folder of the checkpoints and the drafter.")],
    eval_data: Annotated[
        list[Path] | None, typer.Option(help="Held-out text, for loss and acceptance length.")
    ] = None,
    stage: Annotated[
        str, typer.Option(help="Preset of the paper: short, long or finetune.")
    ] = "short",
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter of the stage before [default: a new one].")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --output.")
    ] = False,
    row_length: Annotated[
        int | None, typer.Option(min=8, help="Tokens of a row [default: the stage's].")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of an optimizer step [default: the stage's].")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="The highest [default: the stage's].")
    ] = None,
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
    text_field: Annotated[str, typer.Option(help="Key of the text in a line of JSONL.")] = "text",
    eval_rows: Annotated[int, typer.Option(min=1, help="Rows of held-out text, at most.")] = 64,
    eval_prompts: Annotated[
        int, typer.Option(min=0, help="Held-out texts that evaluation continues.")
    ] = 4,
    eval_prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 1024,
    eval_new_tokens: Annotated[int, typer.Option(min=1, help="How far they are continued.")] = 128,
    target_dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: as stored.")
    ] = "auto",
) -> None:
    """Train LongSpec's drafter; all other options go to transformers' TrainingArguments.

    For example --per_device_train_batch_size 4 --max_steps 1000 --bf16 True --save_steps 200
    --deepspeed zero1.json --fsdp full_shard. Several processes: torchrun -m specattn.cli train ...
    """
    with one_line_errors():
        from specattn._training import Plan, Run

        plan = Plan(
            target=target,
            data=data,
            output=output,
            eval_data=eval_data or [],
            stage=stage,
            drafter=drafter,
            resume=resume,
            row_length=row_length,
            batch_size=batch_size,
            learning_rate=learning_rate,
            anchor_offset=anchor_offset,
            levels=levels,
            window=window,
            text_field=text_field,
            eval_rows=eval_rows,
            eval_prompts=eval_prompts,
            eval_prompt_tokens=eval_prompt_tokens,
            eval_new_tokens=eval_new_tokens,
            target_dtype=target_dtype,
        )
        run = Run(plan, context.args)
    run.train()

"""One training run: what every ``specattn train`` command does once its options are read."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from typing import Any, NoReturn, cast

import torch
import transformers
from transformers import HfArgumentParser, TrainingArguments

from specattn.cli.errors import naming
from specattn.cli.loading import dtype_named, load_tokenizer, model_folder
from specattn.cli.options import TrainingOptions
from specattn.cli.terminal import console, say, status
from specattn.decoding.model.checkpoint import load_causal_model
from specattn.files import check_folder_writable
from specattn.training import Documents, DrafterTrainer, PackedRows, Preset, Recipe, find_files
from specattn.training.checkpoints import (
    check_settings,
    checkpoints,
    is_complete,
    settings_of,
    write_settings,
)
from specattn.training.curves import draw_losses

_TOKENS_PER_PASS = 8192
_COSTS = ("runtime", "samples_per_second", "steps_per_second")  # of evaluation: for the logs
_OF_PRESET = ("row_length", "batch_size", "learning_rate")  # which options may change


class TrainingRun:
    """A run that is ready to start; what is wrong with its options is checked cheapest first.

    `trainer_options` are those of `transformers.TrainingArguments`, as on a command line.
    """

    def __init__(self, options: TrainingOptions, recipe: Recipe, trainer_options: list[str]):
        self.options, self.recipe = options, recipe
        asked = {name: getattr(options, name) for name in _OF_PRESET}
        preset = replace(recipe.preset, **{k: v for k, v in asked.items() if v is not None})
        folder = model_folder(options.target, "--target")
        dtype = dtype_named(options.target_dtype, "--target-dtype")
        with naming("--data"):
            files = find_files(options.data)
        if options.patience and not options.eval_data:
            raise ValueError("--patience: needs held-out text to stop by, give --eval-data")
        self.arguments = _trainer_arguments(options, recipe, preset, trainer_options)
        console.quiet = self.arguments.process_index > 0
        self.settings = settings_of(options, recipe, preset, self.arguments, files)
        self.checkpoint = self._checkpoint()
        transformers.logging.disable_progress_bar()
        tokenizer = load_tokenizer(folder)
        target = load_causal_model(folder, dtype)
        if preset.row_length > (limit := target.config.max_position_embeddings):
            row = f"--row-length: {preset.row_length}"
            raise ValueError(f"{row} is beyond the target's {limit} positions")
        documents = Documents(files, options.text_field)
        seed, endless = self.arguments.seed, self.arguments.max_steps > 0
        self.rows = PackedRows(documents, tokenizer, preset.row_length, seed=seed, endless=endless)
        self.eval_rows: PackedRows | None = None
        self.prompts: list[torch.Tensor] = []
        if options.eval_data:
            with naming("--eval-data"):
                held_out = Documents(find_files(options.eval_data), options.text_field)
            limit = options.eval_rows
            self.eval_rows = PackedRows(held_out, tokenizer, preset.row_length, limit=limit)
            length = options.eval_prompt_tokens
            self.prompts = held_out.beginnings(tokenizer, options.eval_prompts, length)
            if options.eval_prompts and not self.prompts:
                raise ValueError(f"--eval-prompt-tokens: no held-out text has {length} tokens")
        self._count()
        if options.drafter is not None:  # float32, because small steps are lost in 16 bits
            drafter = recipe.drafter_class.from_pretrained(options.drafter, dtype=torch.float32)
        else:
            transformers.set_seed(seed)  # what begins at random does so alike in every such run
            drafter = recipe.new_drafter(target, str(options.target)).float()
            recipe.fit_start(drafter, target, (row["input_ids"] for row in self.rows))
        self.objective = recipe.objective(target, drafter)
        parameters = sum(p.numel() for p in self.objective.drafter.parameters())
        say(f"drafter of {parameters / 1e6:.1f} M parameters for {folder}")
        if not self.arguments.report_to and find_spec("tensorboard") is None:
            say("no tensorboard logs: tensorboard is not installed")

    def train(self) -> None:
        """Train to the end; the output folder then is the drafter, in the target's dtype."""
        trainer = DrafterTrainer(
            self.objective,
            self.arguments,
            train_dataset=self.rows,
            eval_dataset=self.eval_rows,
            method=self.recipe.method,
            prompts=self.prompts,
            new_tokens=self.options.eval_new_tokens,
            matrix_rate=self.options.muon,
            patience=self.options.patience,
        )
        if trainer.is_world_process_zero():
            write_settings(self.options.output, self.settings)
        trainer.train(resume_from_checkpoint=self.checkpoint)
        if self.options.patience:
            state = trainer.state
            say(f"ended at step {state.global_step}, best at step {state.best_global_step}")
        trainer.save_model()
        trainer.save_state()
        if trainer.is_world_process_zero():
            dtype = self.objective.target.dtype
            drafter = self.recipe.drafter_class.from_pretrained(self.options.output, dtype=dtype)
            drafter.save_pretrained(self.options.output)
        if self.eval_rows is not None:
            found = trainer.evaluate().items()
            shown = {name.removeprefix("eval_"): x for name, x in found if name.startswith("eval_")}
            kept = (name for name in shown if name not in _COSTS)
            say(", ".join(f"{name.replace('_', ' ')} {shown[name]:.3f}" for name in kept))
        if trainer.is_world_process_zero():
            picture = self.options.output / "loss.png"
            try:
                draw_losses(trainer.state.log_history, picture)
                say(f"losses: {picture}")
            except ImportError:
                say("no picture of the losses: matplotlib is not installed")
        say(f"drafter: {self.options.output}")

    def _checkpoint(self) -> str | None:
        """Return the checkpoint to go on from; refuse to mix two runs in one folder."""
        output = self.options.output
        with naming("--output"):
            check_folder_writable(output)
        found = checkpoints(output)
        if not self.options.resume:
            if found:
                here = f"--output: {output} holds the checkpoints of a run"
                raise ValueError(f"{here}; go on with --resume, or choose another folder")
            return None
        if not found:
            raise ValueError(f"--resume: there is no checkpoint in {output}")
        check_settings(output, self.settings)
        complete = next(filter(is_complete, found), None)
        if complete != found[0]:
            begin = "the beginning" if complete is None else complete
            say(f"{found[0]} is not complete: going on from {begin}")
        return None if complete is None else str(complete)

    def _count(self) -> None:
        """See that there is text, and count its rows unless the number of steps is given."""
        rows = self.rows
        with status("reading the data once, to know how many steps it gives"):
            count = len(list(islice(rows, 1))) if rows.endless else rows.count()
        if count == 0:
            raise ValueError(f"--data: less text than one row of {rows.row_length} tokens")
        if not rows.endless:
            files, skipped = len(rows.documents.files), len(rows.documents.skipped)
            texts = f"{files} files, {skipped} texts skipped"
            say(f"{count} rows of {rows.row_length} tokens from {texts}")


class _Parser(HfArgumentParser):
    """Trainer options whose errors are exceptions, not a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _trainer_arguments(
    options: TrainingOptions, recipe: Recipe, preset: Preset, trainer_options: list[str]
) -> TrainingArguments:
    """Return the trainer's arguments: the method's, then the user's."""
    parser = _Parser(cast(Any, TrainingArguments), allow_abbrev=False)
    rows = max(1, _TOKENS_PER_PASS // preset.row_length)
    on_gpu = torch.cuda.is_available()
    parser.set_defaults(
        output_dir=str(options.output),
        learning_rate=preset.learning_rate,
        per_device_train_batch_size=min(rows, preset.batch_size),
        per_device_eval_batch_size=rows,
        bf16=on_gpu and torch.cuda.is_bf16_supported(),
        eval_strategy="steps" if options.eval_data else "no",
        report_to="tensorboard" if find_spec("tensorboard") else "none",
        eval_steps=500,
        save_total_limit=3,
        ddp_find_unused_parameters=False,
        logging_steps=10,
        dataloader_pin_memory=on_gpu,
        use_cpu=not torch.accelerator.is_available(),
    )
    parser.set_defaults(**recipe.trainer_defaults)
    _refuse(trainer_options, "gradient_accumulation_steps", "follows from --batch-size: give that")
    if options.patience:
        for name in ("save_strategy", "save_steps", "load_best_model_at_end"):
            _refuse(trainer_options, name, "follows from --patience, as often as --eval_steps")
        parser.set_defaults(load_best_model_at_end=True)
    given, unknown = parser.parse_known_args(trainer_options)
    if unknown:
        raise ValueError(f"unknown options: {' '.join(unknown)}")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rows = given.per_device_train_batch_size * world
    if preset.batch_size % rows:
        raise ValueError(
            f"--batch-size: {preset.batch_size} rows are no multiple of the {rows} that one pass "
            f"takes ({given.per_device_train_batch_size} on each of {world} devices)"
        )
    parser.set_defaults(gradient_accumulation_steps=preset.batch_size // rows)
    if options.patience:  # what is compared is saved
        if given.eval_strategy == "no":
            raise ValueError("--patience: needs evaluations, got --eval_strategy no")
        parser.set_defaults(save_strategy=given.eval_strategy, save_steps=given.eval_steps)
    (arguments,) = parser.parse_args_into_dataclasses(trainer_options, look_for_args_file=False)
    if arguments.n_gpu > 1:
        raise ValueError(
            f"{arguments.n_gpu} GPUs need as many processes: start with torchrun --nproc-per-node "
            f"{arguments.n_gpu} -m specattn.cli train, or choose one with CUDA_VISIBLE_DEVICES"
        )
    return arguments


def _refuse(trainer_options: list[str], name: str, reason: str) -> None:
    """Raise ValueError where the option `name` of the trainer is given."""
    given = (option.partition("=")[0].replace("-", "_") for option in trainer_options)
    if f"__{name}" in given:
        raise ValueError(f"--{name} {reason}")

"""`DrafterTrainer`: transformers' trainer for a drafter beside a frozen target."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from specattn.decoding import Method, generate
from specattn.training.muon import MuonWithAdamW
from specattn.training.patience import Patience
from specattn.training.recipe import Objective

logger = logging.get_logger(__name__)

_PART = "drafter."


class DrafterTrainer(Trainer):
    """Train ``objective.drafter`` beside a frozen ``objective.target``.

    Checkpoints and the result hold the drafter alone, as its own ``save_pretrained`` writes it, and
    evaluation decodes held-out prompts to measure the drafter's acceptance.

    Parameters
    ----------
    objective : Objective
        The scalars that it returns beside the loss are logged with it, each as its mean over the
        rows since the last entry; in evaluation as ``eval_...``, its mean over all rows.
    args : TrainingArguments
    method : callable, optional
        ``method(drafter)`` makes a decoding method of the drafter. Without it acceptance is not
        measured.
    prompts : sequence of Tensor, int64 [L]
        What evaluation continues, at temperature 0.
    new_tokens : int
        Per prompt.
    matrix_rate : float, optional
        Matrices learn by Muon, at this highest rate, and all else by AdamW, whatever
        ``args.optim`` says.
    patience : int, optional
        Stop after so many evaluations in a row without a lower loss (or what
        ``args.metric_for_best_model`` names), and end with the best weights. For that `args` must
        save at each evaluation, with ``load_best_model_at_end``.
    **options
        Of `transformers.Trainer`: ``train_dataset``, ``eval_dataset``, ``callbacks``, ...
    """

    def __init__(
        self,
        objective: Objective,
        args: TrainingArguments,
        *,
        method: Callable[[Any], Method] | None = None,
        prompts: Sequence[torch.Tensor] = (),
        new_tokens: int = 128,
        matrix_rate: float | None = None,
        patience: int | None = None,
        **options: Any,
    ):
        super().__init__(objective, args, **options)
        self.patience = None if patience is None else Patience(patience)
        if self.patience is not None:
            self.add_callback(self.patience)
        self.matrix_rate = matrix_rate
        self.method, self.prompts, self.new_tokens = method, prompts, new_tokens
        self._means = {"loss": _Means(), "eval_loss": _Means()}

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any
    ) -> TrainOutput:
        """Train as `transformers.Trainer` does; a run that has stopped early is only read again."""
        if self.patience is not None and isinstance(resume_from_checkpoint, str):
            last = Path(resume_from_checkpoint)
            state = TrainerState.load_from_json(str(last / TRAINER_STATE_NAME))
            if self.patience.is_spent(state):
                if self.is_deepspeed_enabled or self.is_fsdp_enabled:
                    raise ValueError(f"{last} is the end of a run that stopped early")
                self.state = state
                best = last.with_name(f"checkpoint-{state.best_global_step}")
                self._load_from_checkpoint(str(best if best.is_dir() else last))
                return TrainOutput(state.global_step, math.nan, {})
        return super().train(resume_from_checkpoint, *arguments, **options)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the loss, and count what the objective returns beside it."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        means = self._means["loss" if model.training else "eval_loss"]
        means.add(outputs, rows=len(inputs["input_ids"]))
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return what the arguments name, or Muon with AdamW."""
        if self.matrix_rate is not None and self.optimizer is None:
            args = self.args
            self.optimizer = MuonWithAdamW(
                cast(nn.Module, self.model if model is None else model),
                matrix_rate=self.matrix_rate,
                weight_decay=args.weight_decay,
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
            )
        return super().create_optimizer(model)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the objective's scalars to the entries that have its loss."""
        for entry, means in self._means.items():
            if entry in logs:
                prefix = entry.removesuffix("loss")
                found = means.take(self.accelerator.reduce)
                logs.update({prefix + name: mean for name, mean in found.items()})
        super().log(logs, start_time)

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Add ``eval_acceptance_length`` (tokens per pass, bonus included) to the usual metrics."""
        metrics: dict[str, float] = super().evaluate(*arguments, **options)
        if self.method is not None and self.prompts:
            if self.is_fsdp_enabled or is_deepspeed_zero3_enabled():
                logger.warning_once("acceptance is not measured: the target's weights are sharded")
            else:
                length = self._acceptance_length(self.method)
                metrics["eval_acceptance_length"] = length
                self.log({"eval_acceptance_length": length})
        return metrics

    def _acceptance_length(self, method: Callable[[Any], Method]) -> float:
        """Decode this process' share of the prompts; average over the passes of all processes."""
        objective = self.accelerator.unwrap_model(self.model)
        accepted = rounds = 0
        if share := self.prompts[self.args.process_index :: self.args.world_size]:
            drafter = copy.deepcopy(objective.drafter).to(objective.target.dtype).eval()
            output = generate(
                objective.target,
                share,
                method(drafter),
                max_new_tokens=self.new_tokens,
                temperature=0.0,
            )
            total = output.statistics.total
            accepted, rounds = total.accepted, total.rounds
        counts = torch.tensor([[accepted, rounds]], device=self.args.device)
        accepted, rounds = self.accelerator.gather(counts).sum(0).tolist()
        return 1 + accepted / rounds

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Write the drafter's part of what would be written."""
        if not self.args.should_save:
            return
        drafter = self.accelerator.unwrap_model(self.model).drafter
        if state_dict is not None:  # gathered from all processes
            state_dict = {
                name.removeprefix(_PART): weight
                for name, weight in state_dict.items()
                if name.startswith(_PART)
            }
        drafter.save_pretrained(output_dir or self.args.output_dir, state_dict=state_dict)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Read what `_save` wrote; FSDP keeps files of its own."""
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights = load_file(Path(resume_from_checkpoint) / "model.safetensors")
        self.accelerator.unwrap_model(self.model).drafter.load_state_dict(weights)

    def _load_best_model(self) -> None:
        """Read the best checkpoint's drafter."""
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))


class _Means:
    """Running means of the scalars of batches, without waiting for the device."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, outputs: dict[str, torch.Tensor], rows: int) -> None:
        """Count every scalar but the loss once per row."""
        for name, value in outputs.items():
            if name != "loss":
                sums = torch.stack([value.detach().float() * rows, value.new_tensor(rows)])
                self.sums[name] = self.sums[name] + sums if name in self.sums else sums

    def take(self, reduce: Callable[[dict], dict]) -> dict[str, float]:
        """Return the means over the rows of all processes, and start over."""
        sums, self.sums = reduce(self.sums), {}
        return {name: float(total / rows) for name, (total, rows) in sums.items()}

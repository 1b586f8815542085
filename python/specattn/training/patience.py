"""Early stopping: ends a training run whose held-out loss falls no more."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class Patience(TrainerCallback):
    """Ends training after `evaluations` in a row that are no better than the best before them.

    The trainer must save behind each evaluation. What is counted is in its state, which checkpoints
    hold, so a resumed run ends where an unbroken one does, and one that has ended trains no more:
    with transformers' `EarlyStoppingCallback` it would go on to its next evaluation.
    """

    def __init__(self, evaluations: int):
        self.evaluations = evaluations

    def is_spent(self, state: TrainerState) -> bool:
        """Return whether so many evaluations followed the best one; a loss of NaN is never best."""
        best = state.best_global_step or 0
        later = sum("eval_loss" in entry and entry["step"] > best for entry in state.log_history)
        return later >= self.evaluations

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Decide; the trainer has compared the loss with the best one by now."""
        if self.is_spent(state):
            control.should_training_stop = True

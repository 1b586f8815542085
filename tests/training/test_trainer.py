"""The trainer: a run that was killed and resumed is the run that was not, and what it leaves."""

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from specattn.decoding import LongSpec, generate
from specattn.drafters import LongSpecDrafter
from specattn.training import Documents, DrafterTrainer, LongSpecObjective, PackedRows, find_files
from tests.decoding.models import letters, tiny_model

STEPS, SAVED_AT, KILLED_AT = 8, 3, 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Fourteen rows of 24 tokens in four files: eight steps of four rows are two epochs."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = torch.Generator().manual_seed(5)
    for name in "abcd":
        letter_codes = torch.randint(32, 127, (90,), generator=generator).tolist()
        (folder / name).write_text("".join(map(chr, letter_codes)))
    return find_files([folder])


def trainer(folder, files, callbacks=(), matrix_rate=None, patience=None, held_out=None, **options):
    target = tiny_model("qwen3", peak=1.0)
    drafter = LongSpecDrafter.for_target(target, target="toy", window=8)
    arguments = TrainingArguments(
        output_dir=str(folder),
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"save_steps": SAVED_AT} | options,
    )
    rows = PackedRows(Documents(files), letters(), 24, seed=0, endless="max_steps" in options)
    return DrafterTrainer(
        LongSpecObjective(target, drafter),
        arguments,
        matrix_rate=matrix_rate,
        patience=patience,
        train_dataset=rows,
        eval_dataset=held_out,
        callbacks=[*callbacks],
    )


def losses(trainer):
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def weights(folder):
    return LongSpecDrafter.from_pretrained(folder).state_dict()


class Kill(TrainerCallback):
    """Ends the run as Ctrl-C does, in the middle of a step."""

    def __init__(self, at=KILLED_AT):
        self.at = at

    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "length",
    [
        {"max_steps": STEPS},
        {"num_train_epochs": 2, "matrix_rate": 0.02},
        pytest.param({"num_train_epochs": 2}, marks=pytest.mark.slow),
        pytest.param({"max_steps": STEPS, "matrix_rate": 0.02}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_losses_of_an_unbroken_one(tmp_path, corpus, length):
    unbroken = trainer(tmp_path / "unbroken", corpus, **length)
    unbroken.train()
    unbroken.save_model()

    killed = trainer(tmp_path / "killed", corpus, [Kill()], **length)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    torch.manual_seed(77)  # nothing may hang on what the new process has drawn so far
    resumed = trainer(tmp_path / "killed", corpus, **length)
    resumed.train(resume_from_checkpoint=get_last_checkpoint(tmp_path / "killed"))
    resumed.save_model()

    assert len(losses(unbroken)) == STEPS
    assert losses(resumed) == losses(unbroken)
    assert len(set(losses(unbroken).values())) == STEPS
    for name, weight in weights(tmp_path / "unbroken").items():
        assert torch.equal(weights(tmp_path / "killed")[name], weight)


@pytest.fixture(scope="module")
def other_text(tmp_path_factory):
    """Rows of another text: what is learnt of `corpus` helps with it at first, then no more."""
    folder = tmp_path_factory.mktemp("held out")
    (folder / "text").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    return PackedRows(Documents(find_files([folder])), letters(), 24)


EARLY = {
    "max_steps": 40,
    "patience": 2,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "load_best_model_at_end": True,
    "save_total_limit": 2,
}


def held_out_losses(trainer):
    history = trainer.state.log_history
    return {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}


def test_a_run_that_learns_no_more_stops_with_its_best_weights(tmp_path, corpus, other_text):
    unbroken = trainer(tmp_path / "unbroken", corpus, held_out=other_text, **EARLY)
    unbroken.train()
    found = held_out_losses(unbroken)
    best = min(found, key=found.get)
    assert 1 < best < EARLY["max_steps"] - 2
    assert [*found] == [*losses(unbroken)] == [*range(1, best + 3)]
    assert unbroken.evaluate()["eval_loss"] == found[best] < found[best + 2]

    # Killed between the best evaluation and the last one, it knows what was best, and since when.
    early = EARLY | {"held_out": other_text}
    killed = trainer(tmp_path / "killed", corpus, [Kill(best + 1)], **early)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    for _ in range(2):  # from where it was killed, and again behind its end
        resumed = trainer(tmp_path / "killed", corpus, **early)
        resumed.train(resume_from_checkpoint=get_last_checkpoint(tmp_path / "killed"))
        assert losses(resumed) == losses(unbroken)
        assert held_out_losses(resumed) == found
        for name, weight in unbroken.model.drafter.state_dict().items():
            assert torch.equal(resumed.model.drafter.state_dict()[name], weight)


def test_checkpoints_hold_the_drafter_alone(tmp_path, corpus):
    run = trainer(tmp_path, corpus, max_steps=SAVED_AT)
    run.train()
    saved = weights(tmp_path / f"checkpoint-{SAVED_AT}")
    own = run.model.drafter.state_dict()
    assert saved.keys() == own.keys()
    assert all(torch.equal(saved[name], own[name]) for name in own)


def test_training_learns_the_text(tmp_path):
    (tmp_path / "text").write_text("abcdefgh" * 100)
    files = find_files([tmp_path])
    run = trainer(tmp_path / "out", files, max_steps=30)
    run.train()
    curve = losses(run)
    assert curve[30] < curve[1] / 2


def test_evaluation_measures_what_decoding_accepts(tmp_path, corpus):
    prompts = [torch.arange(20), torch.arange(30, 45)]
    run = trainer(tmp_path, corpus, max_steps=2)
    run.method, run.prompts, run.new_tokens = LongSpec, prompts, 12
    found = run.evaluate(PackedRows(Documents(corpus), letters(), 24))
    assert found["eval_loss"] > 0
    assert run.state.log_history[-1]["eval_acceptance_length"] == found["eval_acceptance_length"]

    output = generate(
        run.model.target,
        prompts,
        LongSpec(run.model.drafter),
        max_new_tokens=12,
        temperature=0,
    )
    assert found["eval_acceptance_length"] == output.statistics.total.mean_acceptance_length


class WithMean(LongSpecObjective):
    """Also returns what can be told from the text alone."""

    def forward(self, input_ids, labels, num_items_in_batch=None):
        found = super().forward(input_ids, labels, num_items_in_batch)
        return found | {"letter": input_ids.float().mean()}


def test_what_an_objective_returns_beside_the_loss_is_logged_as_means_over_rows(tmp_path, corpus):
    run = trainer(tmp_path, corpus, max_steps=4)
    run.model.__class__ = WithMean
    run.args.logging_steps = 2
    run.train()
    rows = [row["input_ids"].float() for row, _ in zip(run.train_dataset, range(16), strict=False)]
    curve = [entry["letter"] for entry in run.state.log_history if "loss" in entry]
    expected = [torch.stack(rows[first : first + 8]).mean().item() for first in (0, 8)]
    assert curve == pytest.approx(expected)

    held_out = PackedRows(Documents(corpus), letters(), 24, limit=13)  # the last batch is smaller
    found = run.evaluate(held_out)
    expected = torch.stack([row["input_ids"].float() for row in held_out]).mean()
    assert found["eval_letter"] == pytest.approx(expected.item())
    assert run.state.log_history[-1]["eval_letter"] == found["eval_letter"]

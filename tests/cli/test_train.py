"""``specattn train`` as a user types it: what it leaves, and how it refuses."""

import json
import re
import shutil
import sys

import pytest
import torch

from specattn.drafters import (
    DFlashDrafter,
    Eagle3Drafter,
    LongSpecDrafter,
    MedusaHeads,
    PosSDrafter,
    TokenSwiftHeads,
)
from tests.cli.conftest import start
from tests.decoding.models import letters, tiny_model

ROW = ("--row-length", "16", "--batch-size", "4", "--per_device_train_batch_size", "2")
QUIET = ("--disable_tqdm", "True", "--report_to", "none")
SHORT = ("--eval-prompts", 1, "--eval-prompt-tokens", 8, "--eval-new-tokens", 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_model("qwen3", peak=1.0).bfloat16().save_pretrained(folder)
    letters().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("the quick brown fox " * 20)
    lines = [{"text": "jumps over the lazy dog " * 10}, {"txt": "a typing error"}]
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


@pytest.fixture
def train(specattn, target):
    """Train a method on files; return what is said."""

    def run(method, data, *options):
        given = ("train", method, "--target", target, "--data", data, *ROW, *QUIET)
        code, _, said = specattn(*given, *options)
        assert code == 0, said
        return said

    return run


@pytest.fixture
def refused(specattn, target):
    """Train a method, which says in one line why it does not."""

    def run(reason, method, *options):
        code, _, said = specattn("train", method, "--target", target, *ROW, *QUIET, *options)
        assert code == 2
        (line,) = (line for line in said.splitlines() if line.startswith("specattn: "))
        assert line.startswith("specattn: error: ")
        assert reason in line

    return run


def curve(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def test_a_run_leaves_a_drafter_and_says_what_it_skipped(
    train, refused, target, text, tmp_path, caplog
):
    out, log = ("--output", tmp_path / "out"), ("--logging_steps", 1)
    held_out = ("--eval-data", text / "a.txt", "--eval-rows", 4)
    said = train("longspec", text, *out, *log, "--save_steps", 4, *held_out, *SHORT)
    assert f"skipped {text / 'b.jsonl'}:2: no string under 'text'" in caplog.text
    assert "39 rows of 16 tokens from 2 files, 1 texts skipped" in said
    assert "acceptance length 1." in said
    drafter = LongSpecDrafter.from_pretrained(tmp_path / "out")
    assert drafter.config.target == str(target)
    assert str(drafter.dtype) == "torch.bfloat16"  # as the target is stored
    assert len(curve(tmp_path / "out")) == 10  # 39 rows, 4 in a step

    # The next stage goes on from that drafter, in a folder of its own.
    begun = ("--stage", "long", "--drafter", tmp_path / "out", "--output", tmp_path / "next")
    train("longspec", text, *begun, *log, "--max_steps", 1)
    assert curve(tmp_path / "next")[0] < curve(tmp_path / "out")[0]

    # What is there is neither mixed with another run nor overwritten, but can be gone on from.
    refused("go on with --resume", "longspec", "--data", text, *out)
    train("longspec", text, *out, *log, "--resume")
    assert len(curve(tmp_path / "out")) == 10


def test_a_run_with_patience_leaves_its_best_weights_and_goes_on_no_further(
    train, refused, target, text, tmp_path
):
    other = tmp_path / "other.txt"
    other.write_text("THE QUICK BROWN FOX " * 20)
    out = ("--output", tmp_path / "out", "--max_steps", 40, "--logging_steps", 1, "--heads", 1)
    run = (*out, "--eval-data", other, *SHORT, "--patience", 1, "--eval_steps", 2)
    said = train("medusa", text, *run, "--learning-rate", 0.05)
    end, best = map(int, re.search(r"ended at step (\d+), best at step (\d+)", said).groups())
    assert end == best + 2 < 40
    folder = tmp_path / "out"
    left = MedusaHeads.from_pretrained(folder).state_dict()
    saved = MedusaHeads.from_pretrained(folder / f"checkpoint-{best}").bfloat16().state_dict()
    assert all(torch.equal(left[name], weight) for name, weight in saved.items())

    before = curve(folder)
    again = train("medusa", text, *run, "--learning-rate", 0.05, "--resume")
    assert f"ended at step {end}, best at step {best}" in again
    assert curve(folder) == before
    reason = "was started with --patience 1, not 3"
    refused(reason, "medusa", "--data", text, *run, "--learning-rate", 0.05, "--resume",
            "--patience", 3)  # fmt: skip


def test_specialists_start_from_eagle_and_share_features(train, refused, text, tmp_path):
    steps = ("--max_steps", 4, "--logging_steps", 1, "--learning-rate", 1e-3)
    kept = ("--feature-cache", tmp_path / "features")
    train("poss", text, *steps, *kept, "--variant", "eagle-2", "--output", tmp_path / "eagle")
    rows = len([*(tmp_path / "features").rglob("*.safetensors")])
    assert 0 < rows <= 16  # four steps of four rows, some of them alike
    again = (*steps, "--variant", "poss-2", "--depth", 4, "--start", tmp_path / "eagle")
    held_out = ("--eval-data", text / "a.txt", "--eval-rows", 4, *SHORT)
    said = train("poss", text, *again, *kept, *held_out, "--output", tmp_path / "poss")
    assert "token loss 4 " in said
    assert "acceptance length " in said
    assert len([*(tmp_path / "features").rglob("*.safetensors")]) == rows
    drafter = PosSDrafter.from_pretrained(tmp_path / "poss")
    assert (drafter.config.layers, drafter.config.positions_per_layer) == (2, 2)

    # A run that stopped half-way goes on as if it had not; features from disk change nothing.
    train("poss", text, *again, "--output", tmp_path / "cut", "--save_steps", 2)
    shutil.rmtree(tmp_path / "cut" / "checkpoint-4")
    train("poss", text, *again, *kept, "--output", tmp_path / "cut", "--resume")
    assert curve(tmp_path / "cut") == pytest.approx(curve(tmp_path / "poss"), rel=1e-4)

    # A norm is not added to a trained drafter, nor lost on the way from one.
    none = ("poss", "--data", text, "--output", tmp_path / "none")
    reason = "the drafter to start from has fc_norm False, expected True as in the new one"
    refused(reason, *none, *again, "--fc-norm")
    reason = "norm_output: a norm is for new drafters, and this one has none"
    refused(reason, *none, *steps, "--norm-output", "--drafter", tmp_path / "poss")
    reason = "--variant: expected one of eagle-2, hass, poss-1, poss-2, poss-3, got 'poss-9'"
    refused(reason, *none, *again, "--variant", "poss-9")


def test_eagle3_learns_from_what_it_drafts(train, refused, text, tmp_path):
    steps = ("--max_steps", 4, "--logging_steps", 1, "--learning-rate", 1e-2, "--depth", 3)
    own = ("--feature-layers", "1,2", "--draft-vocab-size", 40, "--token-heads", 1)
    held_out = ("--eval-data", text / "a.txt", "--eval-rows", 4, *SHORT)
    said = train("eagle3", text, *steps, *own, *held_out, "--output", tmp_path / "out")
    assert "token loss 3 " in said
    assert "acceptance length " in said
    losses = curve(tmp_path / "out")
    assert losses[-1] < losses[0]
    drafter = Eagle3Drafter.from_pretrained(tmp_path / "out")
    assert drafter.config.feature_layers == [1, 2]
    assert (len(drafter.tokens), drafter.config.num_key_value_heads) == (40, 3)

    none = ("eagle3", "--data", text, "--output", tmp_path / "none")
    refused("deepest layer is 9, the target's is ", *none, *steps, "--feature-layers", "1,9")
    refused("--feature-layers: expected numbers such as 2,4,6, got 'low'", *none, *steps,
            "--feature-layers", "low")  # fmt: skip


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_dflash_learns_to_draft_blocks(train, refused, text, tmp_path, causal):
    steps = ("--max_steps", 4, "--logging_steps", 1, "--learning-rate", 1e-2, "--layers", 2)
    own = ("--block-size", 4, "--anchors", 5, "--feature-layers", "1,2")
    own += ("--causal", "--muon", 0.02) if causal else ()
    held_out = ("--eval-data", text / "a.txt", "--eval-rows", 4, *SHORT)
    said = train("dflash", text, *steps, *own, *held_out, "--output", tmp_path / "out")
    assert "token loss 3 " in said
    assert "token loss 4 " not in said
    assert "acceptance length " in said
    config = DFlashDrafter.from_pretrained(tmp_path / "out").config
    assert (config.layers, config.block_size, config.causal) == (2, 4, causal)
    assert config.feature_layers == [1, 2]
    assert config.mask_token_id == config.vocab_size - 1

    none = ("dflash", "--data", text, "--output", tmp_path / "none", *steps)
    other = ("--bidirectional",) if causal else ("--causal",)
    reason = f"causal: {not causal}, the drafter has {causal}"
    refused(reason, *none, *other, "--drafter", tmp_path / "out")
    reason = "mask_token_id must be below vocab_size"
    refused(reason, *none, *own, "--mask-token-id", 10**6)


def test_a_dflash_run_that_stopped_half_way_draws_the_same_anchors_from_there_on(
    train, text, tmp_path
):
    steps = ("--max_steps", 4, "--logging_steps", 1, "--learning-rate", 1e-2, "--layers", 2)
    own = ("--block-size", 4, "--anchors", 5, "--feature-layers", "1,2", "--causal", "--muon", 0.02)
    train("dflash", text, *steps, *own, "--output", tmp_path / "whole")
    train("dflash", text, *steps, *own, "--output", tmp_path / "cut", "--save_steps", 2)
    shutil.rmtree(tmp_path / "cut" / "checkpoint-4")
    train("dflash", text, *steps, *own, "--output", tmp_path / "cut", "--resume")
    assert curve(tmp_path / "cut") == pytest.approx(curve(tmp_path / "whole"), rel=1e-4)


NORMS = ("--fc-norm", "--norm-output", "--learning-rate", 1e-2, "--max_steps", 2)


def normed(folder):
    """Check that a trained drafter has EAGLE 3.1's norms."""
    drafter = PosSDrafter.from_pretrained(folder)
    assert (drafter.config.fc_norm, drafter.config.norm_output) == (True, True)
    for norm in (drafter.fc_norm, *(s.output_norm for s in drafter.specialists)):
        assert norm.weight.unique().numel() > 1, "it began as one number and was trained"


def test_norms_are_trained_and_kept(train, text, tmp_path):
    train("poss", text / "a.txt", *NORMS, "--variant", "eagle-2", "--output", tmp_path)
    normed(tmp_path)


@pytest.mark.slow
def test_norms_stay_from_a_new_drafter_through_a_start_to_the_specialists(
    train, refused, text, tmp_path
):
    eagle, poss, old = (tmp_path / name for name in ("eagle", "poss", "old"))
    train("poss", text, *NORMS, "--variant", "eagle-2", "--output", eagle)
    train("poss", text, *NORMS, "--depth", 4, "--start", eagle, "--output", poss)
    normed(poss)

    # A run of a version that did not know these switches had them off.
    plain = ("--max_steps", 2, "--variant", "eagle-2", "--output", old)
    train("poss", text, *plain, "--save_steps", 1)
    settings = json.loads((old / "run.json").read_text())
    kept = {name: value for name, value in settings.items() if "norm" not in name}
    assert len(settings) - len(kept) == 3  # max-grad-norm too
    kept = json.dumps(kept | {"max-grad-norm": settings["max-grad-norm"]})
    (old / "run.json").write_text(kept)
    train("poss", text, *plain, "--resume")
    (old / "run.json").write_text(kept)
    reason = "was started with --fc-norm None, not True"
    refused(reason, "poss", "--data", text, *plain, "--resume", "--fc-norm")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--target", "{tmp}/none"], "--target: {tmp}/none is not a folder"),
        (["--data", "{tmp}/none"], "--data: {tmp}/none is neither a file nor a folder"),
        (["--data", "{tmp}"], "--data: no file in {tmp}"),
        (["--eval-data", "{tmp}/none"], "--eval-data: {tmp}/none is neither"),
        (["--eval-data", "{text}", "--eval-prompt-tokens", "500"], "no held-out text has 500"),
        (["--stage", "medium"], "one of short, long, finetune, got 'medium'"),
        (["--resume"], "--resume: there is no checkpoint in {tmp}/out"),
        (["--drafter", "{tmp}"], "{tmp} has no readable config.json"),
        (["--row-length", "513"], "--row-length: 513 is beyond the target's 512 positions"),
        (["--row-length", "500"], "--data: less text than one row of 500 tokens"),
        (["--batch-size", "3"], "3 rows are no multiple of the 2"),
        (["--gradient_accumulation_steps", "2"], "follows from --batch-size"),
        (["--patience", "2"], "--patience: needs held-out text to stop by, give --eval-data"),
        (["--patience", "0"], "patience"),
        (
            ["--eval-data", "{text}", "--patience", "2", "--save_steps", "7"],
            "--save_steps follows from --patience, as often as --eval_steps",
        ),
        (
            ["--eval-data", "{text}", "--patience", "2", "--eval_strategy", "no"],
            "--patience: needs evaluations, got --eval_strategy no",
        ),
        (["--target-dtype", "int8"], "got 'int8'"),
        (["--levels", "0"], "levels"),
        (["--row-lenght", "8"], "unknown options: --row-lenght 8"),
        (["--max_steps", "many"], "argument --max_steps/--max-steps: invalid int value: 'many'"),
        (["--learning-rate", "fast"], "learning-rate"),
        (["--learning-rate", "-1"], "learning-rate"),
        (["--output", "/proc/out"], "--output: folder /proc cannot be written to"),
        (["--output", "{text}/out"], "--output: {text} is not a folder"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_user_errors_are_one_line(refused, target, text, tmp_path, arguments, reason):
    names = {"tmp": tmp_path, "text": text / "b.jsonl", "target": target}
    usual = {"--data": text / "b.jsonl", "--output": tmp_path / "out"}
    given = [word.format(**names) for word in arguments]
    words = [word for pair in usual.items() if pair[0] not in given for word in pair]
    refused(reason.format(**names), "longspec", *words, *given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "kind"), [("tokenswift", TokenSwiftHeads), ("medusa", MedusaHeads)]
)
def test_heads_leave_a_loss_per_head(train, target, text, tmp_path, method, kind):
    said = train(
        method, text / "a.txt", "--heads", 2, "--output", tmp_path, "--eval-data", text / "a.txt",
        *SHORT, "--eval_steps", 3, "--max_steps", 6, "--warmup_steps", 1, "--logging_steps", 1,
    )  # fmt: skip
    assert "accuracy 2 0." in said
    assert re.search(r"acceptance length [1-4]\.", said)
    drafter = kind.from_pretrained(tmp_path)
    assert (drafter.config.num_heads, drafter.config.target) == (2, str(target))
    assert str(drafter.dtype) == "torch.bfloat16"
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    for name in ("loss_1", "loss_2"):
        points = [entry[name] for entry in history if name in entry]
        assert len(points) == 6
        assert points[-1] < points[0]
    assert len([entry for entry in history if "eval_loss_2" in entry]) == 2
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_picture_and_no_failure(train, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = train("medusa", text / "a.txt", "--output", tmp_path, "--max_steps", 1)
    assert "no picture of the losses: matplotlib is not installed" in said
    assert not (tmp_path / "loss.png").exists()


def test_help_names_the_trainers_own_options(specattn):
    code, text, _ = specattn("train", "longspec", "--help")
    assert code == 0
    assert "TrainingArguments" in text
    assert "--anchor-offset" in text


@pytest.fixture(scope="module")
def unbroken(target, text, tmp_path_factory):
    """Return the options of a run of four steps that was saved twice, and its folder."""
    folder = tmp_path_factory.mktemp("unbroken")
    run = ("--heads", 1, "--max_steps", 4, "--save_steps", 2, "--logging_steps", 1)
    given = ("train", "medusa", "--target", target, "--data", text, *ROW, *QUIET, *run)
    with pytest.MonkeyPatch.context() as patch:
        assert start(patch, *given, "--output", folder) == 0
    return run, folder


@pytest.mark.parametrize(
    "missing", ["trainer_state.json", "the last", pytest.param("every", marks=pytest.mark.slow)]
)
def test_a_run_that_was_killed_while_saving_goes_on(train, unbroken, text, tmp_path, missing):
    run, folder = unbroken
    output = tmp_path / "out"
    shutil.copytree(folder, output)
    begins = f"going on from {output / 'checkpoint-2'}"
    if missing == "trainer_state.json":  # which is written last
        (output / "checkpoint-4" / missing).unlink()
    elif missing == "the last":
        content = (output / "checkpoint-4" / "optimizer.pt").read_bytes()
        (output / "checkpoint-4" / "optimizer.pt").write_bytes(content[:-5])
    else:
        shutil.rmtree(output / "checkpoint-2")
        shutil.rmtree(output / "checkpoint-4")
        (output / "checkpoint-2").mkdir()
        begins = "going on from the beginning"
    said = train("medusa", text, *run, "--output", output, "--resume")
    assert f"is not complete: {begins}" in said
    assert curve(output) == curve(folder)
    assert MedusaHeads.from_pretrained(output)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("--row-length", 24), "--row-length 16, not 24"),
        (("--batch-size", 8), "--batch-size 4, not 8"),
        (("--learning-rate", 1), "--learning-rate 0.005, not 1.0"),
        (("--heads", 2), "--heads 1, not 2"),
        (("--seed", 7), "--seed 42, not 7"),
        (("--max_steps", 9), "--max-steps 4, not 9"),
        (("--text-field", "body"), "--text-field text, not body"),
        (("--data", "{text}/a.txt"), "--data {text} (2 files of "),
        (("--target-dtype", "fp32"), "--target-dtype auto, not fp32"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_run_goes_on_only_as_it_was_started(refused, unbroken, text, change, reason):
    run, folder = unbroken
    before = curve(folder)
    change = [str(word).format(text=text) for word in change]
    reason = f"--resume: the run in {folder} was started with {reason.format(text=text)}"
    refused(reason, "medusa", "--data", text, *run, "--output", folder, "--resume", *change)
    assert curve(folder) == before

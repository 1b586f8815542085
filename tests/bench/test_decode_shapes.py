"""Passes at a model's shape: what is timed is what decoding runs."""

import sys
from pathlib import Path

import pytest
import specattn
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import decode_shapes  # noqa: E402
from specattn.decoding import Target  # noqa: E402

CPU = torch.device("cpu")


def test_the_timed_draft_step_reads_the_selection_and_the_root():
    context = 40
    with torch.inference_mode():
        model = decode_shapes._model("tiny", 2, CPU).float()
        target = Target(model, 1, context + 2)
        target.cache.storage.normal_()
        target.cache.seqlens.fill_(context)
        everything = torch.arange(context, dtype=torch.int32).expand(2, context)
        lengths = torch.full((2,), context, dtype=torch.int32)
        token = torch.tensor([[7]])
        with target.attached():
            plain, _ = target.verify(specattn.Tree.chain(0), token)
            selection = decode_shapes._with_root(everything, lengths, context)
            sparse = target.draft(token, 0, selection)
    torch.testing.assert_close(sparse, plain, rtol=1e-4, atol=1e-4)


def test_a_token_takes_keys_and_values_of_all_layers():
    model = decode_shapes._model("tiny", 3, CPU)
    assert decode_shapes._token_bytes(Target(model, 1, 4)) == 3 * 2 * 2 * 64 * 2
    embedding = 2 * 4096 * 256
    weights = 2 * sum(p.numel() for p in model.parameters())
    assert decode_shapes._weight_bytes(model) == weights - embedding


def test_a_round_is_its_drafts_its_selection_and_its_verification():
    seconds = {"plain step": 2.0, "draft step": 0.5, "select": 0.2, "verify, scores": 2.8}
    assert decode_shapes.round_cost(seconds, gamma=6) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--shape", "gpt-9"], "gpt-9"),
        (["--context", "1k,2k"], "--context"),
        (["--ratio", "2"], "ratio"),
        (["--json", "/nowhere/passes.jsonl"], "/nowhere/passes.jsonl"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_2(arguments, named, capsys):
    with pytest.raises(SystemExit) as stop:
        decode_shapes.main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1

"""The embedded hybrid: what it has of the target is the target's, and its script still runs."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(TINY))

from convert import ATTENDING, convert  # noqa: E402
from corpus import held_out_files  # noqa: E402
from measure import token_losses  # noqa: E402
from tests.forks import run_script  # noqa: E402

HYBRID = TINY / "hybrid"
EXCERPTS, EXCERPT_TOKENS = 4, 1024
FURTHER = 0.3  # nats, at most, from the target on the same excerpts


@pytest.fixture(scope="module")
def target():
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def test_what_both_have_computes_the_same(target):
    model = convert(target)
    x, place = torch.randn(1, 33, 256), torch.arange(33)[None]
    for number in range(6):
        both = [one.model.layers[number] for one in (target, model)]
        torch.testing.assert_close(*(layer.mlp(x) for layer in both), rtol=0, atol=0)
        if number in ATTENDING:
            outputs = [
                layer(x, position_embeddings=one.model.rotary_emb(x, place))
                for one, layer in zip((target, model), both, strict=True)
            ]
            torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


def test_reads_held_out_files_nearly_as_the_target(target):
    model = transformers.AutoModelForCausalLM.from_pretrained(HYBRID, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(HYBRID)
    losses = []
    for path in held_out_files()[:EXCERPTS]:
        text = path.read_text(encoding="utf-8")
        ids = torch.tensor([tokenizer.eos_token_id, *tokenizer(text).input_ids])[:EXCERPT_TOKENS]
        losses.append([token_losses(one, ids).mean() for one in (model, target)])
    hybrid, own = torch.tensor(losses).mean(0)
    assert hybrid < own + FURTHER


def test_weights_are_small():
    assert (HYBRID / "model.safetensors").stat().st_size <= 16 * 2**20


@pytest.mark.slow
def test_conversion_runs_end_to_end(tmp_path):
    run_script(TINY / "convert.py", "--toy", "--threads", 1, "--out", tmp_path)
    assert json.loads((tmp_path / "evaluation.json").read_text())["held_out"]["loss"] > 0
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

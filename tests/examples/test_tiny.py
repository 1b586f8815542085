"""The embedded target: what is shipped is what was promised, and its script still runs."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(TINY))

from corpus import held_out_files, training_files  # noqa: E402
from measure import token_losses  # noqa: E402
from tests.forks import run_script  # noqa: E402

EXCERPTS, EXCERPT_TOKENS = 4, 1024
MAX_LOSS = 2.7
MAX_FILE_BYTES = 16 * 2**20


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY)


def test_architecture(model):
    config = model.config
    assert config.model_type == "qwen3"
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (6, 256, 64)
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 2)
    assert config.max_position_embeddings == 32768
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_files_are_small_and_safe():
    files = [path for path in TINY.iterdir() if path.is_file()]
    assert max(path.stat().st_size for path in files) <= MAX_FILE_BYTES
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".md", ".py"}


def test_tokenizer_is_lossless(tokenizer):
    text = held_out_files()[0].read_text(encoding="utf-8")[:20000]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id is not None


def test_split_has_no_overlap():
    held_out = held_out_files()
    assert held_out
    assert not set(held_out) & set(training_files())


def test_held_out_loss(model, tokenizer):
    losses = []
    for path in held_out_files()[:EXCERPTS]:
        text = path.read_text(encoding="utf-8")
        ids = torch.tensor([tokenizer.eos_token_id, *tokenizer(text).input_ids])
        losses.append(token_losses(model, ids[:EXCERPT_TOKENS]))
    assert torch.cat(losses).mean() < MAX_LOSS


def test_build_runs_end_to_end(tmp_path):
    run_script(TINY / "build.py", "--toy", "--threads", 1, "--out", tmp_path)
    assert json.loads((tmp_path / "evaluation.json").read_text())["held_out"]["loss"] > 0
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

"""The embedded drafters: what is shipped fits the target, and drafts as well as was promised."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specattn.decoding import METHODS
from specattn.training import HeadsObjective

TINY = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(TINY))

from corpus import held_out_files, read_texts, training_files  # noqa: E402
from measure_drafter import acceptance, held_out_prompts  # noqa: E402

ROWS, ROW_TOKENS = 4, 512
PROMPT_TOKENS, PROMPTS, NEW_TOKENS = 640, 2, 64
PROMISED = {"longspec": 3.0, "poss": 3.0, "eagle3": 3.0, "mtp": 3.0, "dflash": 2.5}
TREES = {
    "longspec": {"widths": (4, 16, 16, 16, 16)},
    "poss": {"total_tokens": 60},
    "eagle3": {"total_tokens": 60},
    "mtp": {"total_tokens": 60},
    "dflash": {"total_tokens": 64, "window": 512},
    "medusa": {"widths": (3, 3, 3)},
    "tokenswift": {"widths": (1, 3, 3, 3)},
}
HEADS = {"tokenswift": 0.2, "medusa": 0.2}  # how often the first head's first guess is right
MAX_FILE_BYTES = dict.fromkeys([*PROMISED, *HEADS], 16 * 2**20) | {"dflash": 8 * 2**20}


@pytest.mark.parametrize("method", [*PROMISED, *HEADS])
def test_files_are_small_and_safe(method):
    files = list((TINY / method).iterdir())
    assert {path.name for path in files} == {"config.json", "model.safetensors"}
    assert max(path.stat().st_size for path in files) <= MAX_FILE_BYTES[method]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def texts():
    return read_texts(held_out_files(min_bytes=15_000))


@pytest.fixture(scope="module")
def prompts(texts, tokenizer):
    documents = [torch.tensor(tokenizer(text, verbose=False).input_ids) for text in texts]
    return held_out_prompts(documents, PROMPT_TOKENS, PROMPTS)


def test_no_held_out_file_was_trained_on(texts):
    assert not set(texts) & set(read_texts(training_files()))


@pytest.mark.parametrize("method", PROMISED)
def test_acceptance_length_on_held_out_files(method, model, prompts):
    prepared = METHODS[method](**TREES[method]).prepared(model)
    assert [len(prompt) for prompt in prompts] == [PROMPT_TOKENS] * PROMPTS
    found = acceptance(model, prepared, prompts, temperature=0.0, new_tokens=NEW_TOKENS)
    assert found["acceptance_length"] >= PROMISED[method]


@pytest.mark.parametrize("method", HEADS)
def test_heads_guess_on_held_out_files(method, model, tokenizer, texts):
    """Each head better than the next, and the first as well as was promised."""
    heads = METHODS[method](**TREES[method]).prepared(model).drafter
    rows = [
        torch.tensor(tokenizer(text[:8000], verbose=False).input_ids[: ROW_TOKENS + 1])
        for text in texts[:ROWS]
    ]
    text = torch.stack(rows)
    with torch.no_grad():
        found = HeadsObjective(model, heads).eval()(text[:, :-1], text[:, 1:])
    rates = [found[f"accuracy_{head}"].item() for head in (1, 2, 3)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > HEADS[method]

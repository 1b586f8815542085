"""The embedded drafters: what is shipped fits the target, and drafts as well as was promised."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specattn.decoding import METHODS

TINY = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(TINY))

from corpus import held_out_files, read_texts, training_files  # noqa: E402
from measure_drafter import acceptance, held_out_prompts  # noqa: E402

PROMPT_TOKENS, PROMPTS, NEW_TOKENS = 4096, 2, 64
PROMISED = {"longspec": 3.0, "poss": 3.0}
MAX_FILE_BYTES = 16 * 2**20


@pytest.mark.parametrize("method", PROMISED)
def test_files_are_small_and_safe(method):
    files = list((TINY / method).iterdir())
    assert {path.name for path in files} == {"config.json", "model.safetensors"}
    assert max(path.stat().st_size for path in files) <= MAX_FILE_BYTES


@pytest.mark.parametrize("method", PROMISED)
def test_acceptance_length_on_held_out_files(method):
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    prepared = METHODS[method]().prepared(model)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    texts = read_texts(held_out_files(min_bytes=15_000))
    assert not set(texts) & set(read_texts(training_files()))
    documents = [torch.tensor(tokenizer(text, verbose=False).input_ids) for text in texts]
    prompts = held_out_prompts(documents, PROMPT_TOKENS, PROMPTS)
    assert [len(prompt) for prompt in prompts] == [PROMPT_TOKENS] * PROMPTS
    found = acceptance(model, prepared, prompts, temperature=0.0, new_tokens=NEW_TOKENS)
    assert found["acceptance_length"] >= PROMISED[method]

"""`specattn widen`: what it says of the result, and which argument is wrong."""

import json
import re

import pytest

from specattn.planning import MODELS, ModelShape
from tests.widening.test_widening import store

SMALL = ModelShape("small-real", "qwen3", 4, 64, 4, 2, 32, 96, 96)


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, SMALL.name, SMALL)
    store(tmp_path / "small", tie_word_embeddings=True)
    return tmp_path / "small"


def test_a_model_is_widened_and_described(source, specattn, prompt, tmp_path):
    wide = tmp_path / "wide"
    code, text, said = specattn("widen", source, wide, "--like", SMALL.name, "--dtype", "float32")
    assert code == 0, said
    names, own, real, stored, exact, kept = text.splitlines()
    assert names.split("  ")[-1] == "parameters"
    assert own.split()[:8] == ["wide", "4", "64", "8", "4", "16", "96", "96"]
    assert real.split()[:8] == ["small-real", "4", "64", "4", "2", "32", "96", "96"]
    size = sum(file.stat().st_size for file in wide.rglob("*.safetensors")) / 1e9
    names = ("longspec", "poss", "eagle3", "dflash", "mtp", "tokenswift", "medusa")
    assert stored == f"{wide}: {size:.2f} GB, with drafters: {', '.join(names)}"
    assert re.fullmatch(r"float32: logits of 512 tokens differ by \S+, of up to .*", exact)
    for name in names:
        assert re.search(rf"[1-9]\d* of {name}", exact)
    assert kept == "float32, as stored: the same next token behind 100.0% of them"
    assert json.loads((wide / "poss" / "config.json").read_text())["target"] == str(wide)
    line = ("--model", wide, "--prompt-file", prompt, "--method", "poss", "--max-new-tokens", "8")
    assert specattn("generate", *line)[0] == 0


def test_what_is_wrong_is_named(source, refused, tmp_path):
    out, like = tmp_path / "wide", ("--like", SMALL.name)
    refused("SOURCE: nowhere is not a folder", "widen", "nowhere", out)
    refused("--like: expected one of", "widen", source, out, "--like", "qwen3-30b-a3b")
    refused("--dtype: expected one of bfloat16, float32", "widen", source, out, "--dtype", "fp16")
    refused("--layers: layers: 2 are fewer", "widen", source, out, *like, "--layers", "2")
    refused("--like: layers: 4 are fewer", "widen", "tiny", out, *like)
    refused("OUTPUT: " + str(source) + " exists", "widen", source, source, *like)
    (source / "config.json").write_text('{"model_type": "mixtral"}')
    refused("SOURCE: " + str(source) + " is of type 'mixtral'", "widen", source, out)
    assert not out.exists()

"""`specattn quantize`: what it says, what is wrong, and that `generate` continues as it says."""

import json

import pytest


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_a_stored_model_has_the_texts_of_a_rounded_one(specattn, prompt, tmp_path, kind):
    out = tmp_path / "few"
    code, text, said = specattn("quantize", "tiny", out, f"--{kind}")
    assert code == 0, said
    sizes, next_line = text.splitlines()
    stored = (out / "model.safetensors").stat().st_size / 1e9
    assert sizes.startswith(f"{out}: {stored:.2g}"[:-1])
    assert f"GB, of 0.0155: 42 layers in {kind}, " in sizes
    assert next_line == f"specattn generate --model {out} --prompt-file FILE"
    line = ("generate", "--prompt-file", prompt, "--method", "plain", "--max-new-tokens", "24")
    found = specattn(*line, "--model", out)
    assert found[0] == 0
    assert found[1] == specattn(*line, "--quantize", kind)[1] != ""
    assert json.loads((out / "config.json").read_bytes())["dtype"] == "bfloat16"


def test_what_is_wrong_is_named(refused, tmp_path):
    out = tmp_path / "few"
    refused("expected one of --int4, --int8, --fp8, got none", "quantize", "tiny", out)
    refused("got --int4 and --fp8", "quantize", "tiny", out, "--fp8", "--int4")
    refused("MODEL: nowhere is not a folder", "quantize", "nowhere", out, "--int4")
    refused(f"OUTPUT: {tmp_path} exists", "quantize", "tiny", tmp_path, "--int4")
    refused("OUTPUT: ", "quantize", "tiny", out / "inside", "--int4")
    assert not out.exists()

"""``specattn generate`` as a user types it: what it prints, what it writes, and how it refuses."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specattn.decoding import generate
from tests.cli.conftest import TINY

DYNAMIC = {"rope_theta": 1e6, "rope_type": "dynamic", "factor": 2.0}
LONGROPE = {"rope_theta": 1e6, "rope_type": "longrope", "factor": 2.0}
LONGROPE |= {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
SHORT = {"max_position_embeddings": 200, "original_max_position_embeddings": 200}
FEW = ("--max-new-tokens", 6)


def with_config(folder, **changes):
    """Write a copy of the embedded target whose config differs."""
    folder.mkdir()
    for file in TINY.glob("*"):
        if file.suffix in (".json", ".safetensors"):
            (folder / file.name).symlink_to(file)
    config = json.loads((TINY / "config.json").read_text()) | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_generate_streams_text_and_writes_json(specattn, prompt, tmp_path):
    runs = {}
    for method in ("plain", "vegas", "longspec"):  # the last with the drafter that is shipped
        out = tmp_path / f"{method}.json"
        options = ("--max-new-tokens", 12, "--json", out)
        code, text, _ = specattn("generate", "--prompt-file", prompt, "--method", method, *options)
        runs[method] = json.loads(out.read_text())
        assert code == 0
        assert text == runs[method]["text"] + "\n"
    plain, vegas, longspec = runs.values()
    assert plain["schema"] == "specattn.generate/1"
    assert len(plain["tokens"]) == plain["statistics"]["new_tokens"] == 12
    assert vegas["tokens"] == longspec["tokens"] == plain["tokens"]
    assert longspec["statistics"]["passes"] < 12
    assert vegas["method"]["name"] == "vegas"
    assert vegas["method"]["gamma"] is None
    assert vegas["statistics"]["passes"] <= plain["statistics"]["passes"] == 12
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".py"}  # nothing half written


def test_auto_is_the_default_and_explains_itself(specattn, prompt, tmp_path):
    out = tmp_path / "auto.json"
    options = ("--prompt-file", prompt, "--max-new-tokens", 12, "--json", out)
    code, _, messages = specattn("generate", *options, "--explain")
    assert code == 0
    written = json.loads(out.read_text())
    assert written["method"]["name"] == "auto"
    rounds = written["statistics"]["details"]["rounds"]
    assert sum(rounds.values()) == written["statistics"]["rounds"]
    assert "tokens per round" in messages
    for name in rounds:
        assert re.search(rf"^{name} +{rounds[name]} ", messages, re.MULTILINE)
    assert "tokens per round" not in specattn("generate", *options)[2]


def test_longspec_takes_a_drafter(specattn, prompt, drafter, tmp_path):
    out = tmp_path / "out.json"
    method = ("--method", f"longspec:drafter={drafter},widths=[2,3]")
    options = ("--prompt-file", prompt, "--max-new-tokens", 6, "--json", out)
    code, text, _ = specattn("generate", *options, *method)
    assert code == 0
    written = json.loads(out.read_text())
    assert written["text"] + "\n" == text
    assert written["method"] == {
        "name": "longspec",
        "drafter": str(drafter),
        "widths": [2, 3],
        "nodes": None,
        "gamma": None,
        "rejection": False,
    }


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("drafter={tmp}/none", "none is not a folder"),
        ("drafter={tiny}", "holds a model of type 'qwen3', not a LongSpec drafter"),
        ("drafter={drafter},widths=4;4", "--method: longspec: widths: expected integers"),
        ("drafter={drafter},widths=[4,0]", "--method: widths must be one or more positive"),
        ("drafter={drafter},gamma=512", "window of 512 must be greater"),
    ],
)
def test_drafters_that_do_not_serve(specattn, prompt, drafter, tmp_path, options, reason):
    method = "longspec:" + options.format(tmp=tmp_path, tiny=TINY, drafter=drafter)
    code, text, error = specattn("generate", "--prompt-file", prompt, "--method", method)
    assert (code, text) == (2, "")
    assert error.startswith("specattn: error: ")
    assert error.count("\n") == 1
    assert reason in error


def test_a_seed_decides_what_is_sampled(specattn, prompt):
    options = ("--max-new-tokens", 16, "--temperature", 1.5, "--method", "vegas")
    texts = [
        specattn("generate", "--prompt-file", prompt, *options, "--seed", seed)[1]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_filters_and_the_penalty_reach_the_sampler(specattn, prompt, tmp_path):
    out = tmp_path / "out.json"
    options = ("--prompt-file", prompt, "--max-new-tokens", 12, "--method", "plain", "--json", out)
    penalty = ("--penalty", 1.5, "--penalty-window", 64)
    texts = [
        specattn("generate", *options, *more)[1]
        for more in (
            ("--temperature", 0),
            ("--temperature", 1, "--min-p", 1.0),  # the best token alone is left
            ("--temperature", 0, *penalty),
            ("--temperature", 1, "--min-p", 1.0, *penalty),
            ("--temperature", 1, "--eta", 0.3),
        )
    ]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    sampling = json.loads(out.read_text())["sampling"]
    assert (sampling["eta_cutoff"], sampling["min_p"], sampling["penalty"]) == (0.3, None, 1.0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--prompt-file", "nowhere.txt"], "nowhere.txt is not a file"),
        (["--prompt-file", "{prompt}", "--method", "magic"], "got 'magic'"),
        (["--prompt-file", "{prompt}", "--method", "vegas:gamma=0"], "--method: gamma"),
        (["--prompt-file", "{prompt}", "--method", "vegas:ratio=7"], "--method: ratio"),
        (
            ["--prompt-file", "{prompt}", "--method", "vegas:rows=3"],
            "rows: expected two or all or last,",
        ),
        (["--prompt-file", "{prompt}", "--method", "vegas:gamma=abc"], "gamma: expected an int"),
        (["--prompt-file", "{prompt}", "--method", "vegas:widths=2"], "expected one of gamma"),
        (["--prompt-file", "{prompt}", "--gamma", "4"], "No such option: --gamma"),
        (["--prompt-file", "{prompt}", "--temperature", "warm"], "temperature"),
        (["--prompt-file", "{prompt}", "--seed", str(2**64)], "--seed"),
        (["--prompt-file", "{prompt}", "--dtype", "int8"], "got 'int8'"),
        (["--prompt-file", "{prompt}", "--device", "abacus"], "abacus"),
        (["--prompt-file", "{prompt}", "--device", "meta"], "meta cannot be used"),
        (["--prompt-file", "{prompt}", "--model", "{tmp}/none"], "none is not a folder"),
        (["--prompt-file", "{prompt}", "--model", "{tmp}"], "no readable config.json"),
        (["--prompt-file", "{prompt}", "--json", "{tmp}/none/out.json"], "does not exist"),
        (["--prompt-file", "{binary}"], "not UTF-8"),
        ([], "--prompt-file"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_user_errors_are_one_line(specattn, prompt, tmp_path, arguments, reason):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    names = {"prompt": prompt, "tmp": tmp_path, "binary": binary}
    code, text, error = specattn("generate", *(word.format(**names) for word in arguments))
    assert code == 2
    assert text == ""
    assert error.startswith("specattn: error: ")
    assert error.count("\n") == 1
    assert reason in error


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "nonesuch"}, "knows no models of type 'nonesuch'"),
        ({"is_encoder_decoder": True}, "an encoder-decoder"),
        ({"kv_lora_rank": 16}, "multi-head latent attention (MLA)"),
        ({"logit_scale": 0.5}, "differ by 5.0e-01 in their logits"),
        ({"rope_parameters": DYNAMIC, **SHORT}, "'dynamic' turns with the current length"),
        ({"rope_parameters": LONGROPE, **SHORT}, "'longrope' turns with the current length"),
        ({"head_dim": 20}, "head_dim must be a multiple of 8 up to 256, got 20"),
    ],
    ids=["family", "encoder", "mla", "logits", "dynamic", "longrope", "head_dim"],
)
def test_a_model_that_does_not_fit_is_refused(specattn, prompt, tmp_path, changes, reason):
    model = with_config(tmp_path / "model", **changes)
    code, _, error = specattn("generate", "--prompt-file", prompt, "--model", model)
    assert code == 2
    assert error.count("\n") == 1
    assert reason in error


def test_a_tested_family_that_is_trusted_is_not_compared(specattn, prompt, tmp_path):
    """Here wrongly so: the model does not scale its logits, whatever its config says."""
    model = with_config(tmp_path / "model", logit_scale=0.5)
    options = ("--prompt-file", prompt, "--method", "plain", "--max-new-tokens", 4)
    assert specattn("generate", *options, "--model", model, "--trust-family")[0] == 0
    code, _, error = specattn("generate", *options, "--model", model)
    assert (code, error.count("\n")) == (2, 1)


def test_weights_that_are_not_safetensors_are_refused(specattn, prompt, tmp_path):
    model = with_config(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    code, _, error = specattn("generate", "--prompt-file", prompt, "--model", model)
    assert code == 2
    assert "no *.safetensors" in error


def test_a_text_beyond_the_models_positions_gets_one_warning(specattn, prompt, tmp_path):
    short = with_config(tmp_path / "short", max_position_embeddings=64)
    options = ("--prompt-file", prompt, "--method", "plain", "--max-new-tokens", 8)
    code, text, said = specattn("generate", *options, "--model", short)
    assert code == 0
    assert said.count("go beyond the 64 positions of this model") == 1
    assert specattn("generate", *options)[1] == text


GREEDY_EVEN_SO = {"do_sample": True, "top_p": 0.01, "min_p": 1.0, "repetition_penalty": 5.0}


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_a_checkpoints_sampling_is_not_obeyed(specattn, prompt, tmp_path, command):
    """Options alone say how a text is sampled; where it ends, the checkpoint does."""
    model = with_config(tmp_path / "model")
    given = (command, "--prompt-file", prompt, "--max-new-tokens", 12)
    method = ("--method", "plain") if command == "generate" else ("--methods", "plain")
    for options in ((), ("--temperature", 1, "--seed", 4)):
        usual = specattn(*given, *method, *options)[1]
        config = json.loads((TINY / "generation_config.json").read_text())
        (model / "generation_config.json").unlink()
        (model / "generation_config.json").write_text(json.dumps(config | GREEDY_EVEN_SO))
        code, text, _ = specattn(*given, *method, *options, "--model", model)
        assert code == 0
        assert text == usual


def test_where_a_text_ends_is_the_checkpoints(specattn, prompt, tmp_path):
    model, out = with_config(tmp_path / "model"), tmp_path / "out.json"
    given = ("generate", "--prompt-file", prompt, "--model", model, "--max-new-tokens", 12)
    assert specattn(*given, "--json", out)[0] == 0
    whole = json.loads(out.read_text())
    config = json.loads((TINY / "generation_config.json").read_text())
    path = model / "generation_config.json"
    path.unlink()
    token = whole["tokens"][6]
    path.write_text(json.dumps(config | {"eos_token_id": [0, token]}))
    assert specattn(*given, "--json", out)[0] == 0
    found = json.loads(out.read_text())
    assert found["finish_reason"] == "stop"
    assert found["tokens"] == whole["tokens"][: whole["tokens"].index(token) + 1]
    # Strings need the tokenizer, which the command has.
    path.write_text(json.dumps(config | {"stop_strings": [whole["text"][5:9]]}))
    state = tmp_path / "state"
    code, text, said = specattn(*given, "--json", out, "--state", state)
    assert code == 0, said
    found = json.loads(out.read_text())
    assert found["finish_reason"] == "stop"
    assert whole["text"][5:9] in text
    assert len(found["tokens"]) < 12
    code, text, said = specattn(*given, "--resume", state)
    assert (code, text) == (2, "")
    assert "state holds a text that has come to its end" in said


def test_use_cache_of_a_checkpoint_is_ignored(specattn, prompt, tmp_path):
    """The cache is our own."""
    model = with_config(tmp_path / "model", use_cache=False)
    config = json.loads((TINY / "generation_config.json").read_text()) | {"use_cache": False}
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").write_text(json.dumps(config))
    given = ("generate", "--prompt-file", prompt, "--max-new-tokens", 6)
    code, text, said = specattn(*given, "--model", model)
    assert code == 0, said
    assert text == specattn(*given)[1]
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert generate(loaded, [[1, 2, 3]], "plain", max_new_tokens=2, temperature=0).new_tokens


def broken(folder, change):
    """Write a copy of the embedded target whose weights are changed by `change`."""
    model = with_config(folder)
    weights = load_file(TINY / "model.safetensors")
    change(weights)
    (model / "model.safetensors").unlink()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"),
            "1 missing keys: model.layers.1.mlp.up_proj.weight",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(8)}),
            "1 mismatched keys: ",
        ),
        (
            lambda weights: [weights.pop(name) for name in [*weights] if ".3." in name],
            "11 missing keys: model.layers.3.input_layernorm.weight, ",
        ),
    ],
    ids=["missing", "mismatched", "a layer"],
)
def test_weights_that_are_not_all_there_are_refused(specattn, prompt, tmp_path, change, reason):
    model = broken(tmp_path / "model", change)
    code, text, error = specattn("generate", "--prompt-file", prompt, "--model", model)
    assert (code, text) == (2, "")
    assert error.splitlines()[-1].startswith("specattn: error: ")
    assert reason in error


def test_weights_that_end_early_are_refused(specattn, prompt, tmp_path):
    model = with_config(tmp_path / "model")
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").unlink()
    for length in (0, 5, 1000, len(content) - 1):
        (model / "model.safetensors").write_bytes(content[:length])
        code, _, error = specattn("generate", "--prompt-file", prompt, "--model", model)
        assert code == 2
        assert error.count("\n") == 1
        assert "the weights in " in error


@pytest.mark.parametrize("method", ["longspec:drafter=", "triforce:draft="])
def test_drafters_that_are_not_all_there_are_refused(specattn, prompt, drafter, tmp_path, method):
    folder = drafter
    if "triforce" in method:
        folder = broken(tmp_path / "model", lambda weights: weights.pop("model.norm.weight"))
    else:
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[:-9])
    given = ("generate", "--prompt-file", prompt, "--method", f"{method}{folder}")
    code, text, error = specattn(*given)
    assert (code, text) == (2, "")
    assert error.splitlines()[-1].startswith("specattn: error: ")
    assert f"the weights in {folder} " in error


def test_json_alone_on_standard_output(specattn, prompt):
    code, text, said = specattn("generate", "--prompt-file", prompt, *FEW, "--json", "-")
    assert code == 0
    assert len(json.loads(text)["tokens"]) == 6
    assert "\nauto " in said


@pytest.mark.parametrize("option", ["--json", "--state"])
def test_outputs_that_are_no_files_are_left_alone(specattn, prompt, tmp_path, option):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", os.devnull, tmp_path):
        code, text, error = specattn("generate", "--prompt-file", prompt, option, path)
        assert (code, text) == (2, "")
        assert f"{option}: {path} is " in error
        assert "and is not replaced" in error
    code, _, error = specattn("generate", "--prompt-file", prompt, option, "/proc/out")
    assert code == 2
    assert f"{option}: folder /proc cannot be written to" in error


def test_standard_input_is_a_prompt(specattn, prompt, monkeypatch):
    whole = specattn("generate", "--prompt-file", prompt, *FEW)[1]
    with prompt.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        code, text, said = specattn("generate", "--prompt-file", "-", *FEW)
    assert (code, text) == (0, whole)
    assert "prompt tokens of standard input" in said


def test_the_last_tokens_of_a_prompt(specattn, tmp_path):
    """What is not read is said."""
    whole, end = tmp_path / "whole.py", tmp_path / "end.py"
    end.write_text("\n\ndef last(items):\n    return")
    whole.write_text("import os\n" * 9 + end.read_text())
    expected = specattn("generate", "--prompt-file", end, *FEW)[1]
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    length, total = (len(tokenizer(path.read_text())["input_ids"]) for path in (end, whole))
    code, text, said = specattn("generate", "--prompt-file", whole, *FEW, "--last-tokens", length)
    assert (code, text) == (0, expected)
    assert f"{total - length} at its beginning are not" in said
    said = specattn("generate", "--prompt-file", whole, *FEW, "--prompt-tokens", 3)[2]
    assert f"{total - 3} at its end are not" in said


def test_several_prompts_are_a_batch(specattn, prompt, tmp_path):
    other, out = tmp_path / "other.py", tmp_path / "out.json"
    other.write_text("import os\nimport sys\n")
    alone = [specattn("generate", "--prompt-file", path, *FEW)[1] for path in (prompt, other)]
    both = ("--prompt-file", prompt, "--prompt-file", other)
    code, text, said = specattn("generate", *both, *FEW, "--json", out)
    assert code == 0
    assert text == "".join(alone)
    assert said.index(f"==> {prompt} <==") < said.index(f"==> {other} <==")
    written = json.loads(out.read_text())
    assert [one["text"] + "\n" for one in written["texts"]] == alone
    assert [one["file"] for one in written["prompts"]] == [str(prompt), str(other)]
    assert len(written["statistics"]["requests"]) == 2
    code, _, error = specattn("generate", *both, "--state", tmp_path / "state")
    assert code == 2
    assert "keep one text, got 2 prompts" in error


def test_a_chat_is_what_the_template_makes_of_it(specattn, tmp_path):
    model, out = with_config(tmp_path / "model"), tmp_path / "out.json"
    message = tmp_path / "message"
    message.write_text("What is 1 + 1?")
    given = ("generate", "--prompt-file", message, *FEW, "--model", model, "--json", out)
    code, _, error = specattn(*given, "--chat")
    assert code == 2
    assert "--chat: the model's tokenizer has no chat template" in error
    (model / "chat_template.jinja").write_text(
        "{% for one in messages %}<{{ one.role }}>{{ one.content }}\n{% endfor %}<assistant>"
    )
    texts = {}
    for options, start in (((), ""), (("--system", "Be short."), "<system>Be short.\n")):
        assert specattn(*given, "--chat", *options)[0] == 0
        texts[start] = json.loads(out.read_text())
        (tmp_path / "plain").write_text(f"{start}<user>What is 1 + 1?\n<assistant>")
        plain = ("generate", "--prompt-file", tmp_path / "plain", *FEW, "--json", out)
        assert specattn(*plain)[0] == 0
        assert json.loads(out.read_text())["tokens"] == texts[start]["tokens"]
        assert json.loads(out.read_text())["prompt"]["tokens"] == texts[start]["prompt"]["tokens"]
    for options, reason in (
        (("--system", "Be short."), "give --chat too"),
        (("--chat", "--last-tokens", 3), "leave out --prompt-tokens and --last-tokens"),
        (("--prompt-tokens", 3, "--last-tokens", 3), "not both"),
    ):
        code, _, error = specattn(*given, *options)
        assert code == 2
        assert reason in error


def test_suffix_takes_corpora(specattn, prompt, tmp_path):
    pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")
    found = {}
    for name, options in (("alone", ()), ("beside", ("--corpus", prompt, "--corpus", prompt))):
        out = tmp_path / f"{name}.json"
        options += ("--method", "suffix:nodes=8", "--max-new-tokens", 12, "--json", out)
        assert specattn("generate", "--prompt-file", prompt, *options)[0] == 0
        found[name] = json.loads(out.read_text())
    assert found["alone"]["text"] == found["beside"]["text"]
    assert found["beside"]["method"]["corpus"] == [str(prompt)] * 2
    options = ("--prompt-file", prompt, "--corpus", prompt, "--method", "plain", *FEW)
    code, _, error = specattn("generate", *options)
    assert code != 0
    assert "--corpus: expected --method auto or suffix, got plain" in error

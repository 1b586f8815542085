"""``specattn generate`` as a user types it: what it prints, what it writes, and how it refuses."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specattn.decoding import generate
from tests.cli.conftest import TINY

CLI_PAGE = TINY.parents[1] / "docs" / "cli.md"

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


def test_generate_streams_text_and_writes_json(written, prompt, tmp_path):
    runs = {}
    # The last with the drafter that is shipped; of a given size: 12 tokens pay for no timing.
    for method in ("plain", "vegas", "longspec:widths=[2,2]"):
        runs[method], text, _ = written("generate", "--method", method, "--max-new-tokens", 12)
        assert text == runs[method]["text"] + "\n"
    plain, vegas, longspec = runs.values()
    assert plain["schema"] == "specattn.generate/1"
    assert len(plain["tokens"]) == plain["statistics"]["new_tokens"] == 12
    assert vegas["tokens"] == longspec["tokens"] == plain["tokens"]
    assert longspec["statistics"]["passes"] < 12
    assert (vegas["method"]["name"], vegas["method"]["gamma"]) == ("vegas", None)
    assert vegas["statistics"]["passes"] <= plain["statistics"]["passes"] == 12
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".py"}  # nothing half written


def test_the_embedded_hybrid_is_known_by_its_name(written):
    hybrid = ("generate", "--model", "tiny-hybrid", "--max-new-tokens", 12, "--method")
    plain, suffix = (written(*hybrid, method)[0] for method in ("plain", "suffix"))
    assert plain["model"]["path"].endswith("tiny/hybrid")
    assert plain["tokens"] == suffix["tokens"]


def test_auto_is_the_default_and_explains_itself(written):
    found, _, said = written("generate", "--max-new-tokens", 24, "--explain")
    assert found["method"]["name"] == "auto"
    (described,) = re.findall(r"^\| `details` .*$", CLI_PAGE.read_text(), re.MULTILINE)
    for name in set(re.findall(r"`([^`]+)`", described)) - {"details", "auto", "--explain"}:
        assert any(key.startswith(name.rstrip(". ")) for key in found["statistics"]["details"]), (
            name
        )
    rounds = found["statistics"]["details"]["rounds"]
    assert sum(rounds.values()) == found["statistics"]["rounds"]
    assert "tokens per round" in said
    for name in rounds:
        assert re.search(rf"^{name} +{rounds[name]} ", said, re.MULTILINE)
    explained = " ".join(said.split())
    _, _, said = written("generate", "--max-new-tokens", 24)
    assert "tokens per round" not in said
    for figure in ("decode: ", "draft/target/accept: ", "distinct 1, 2, 3, 4: ", "accept at 1, "):
        assert figure in explained
        assert figure not in said, "unasked"


def test_longspec_takes_a_drafter(written, drafter):
    method = f"longspec:drafter={drafter},widths=[2,3]"
    found, text, _ = written("generate", *FEW, "--method", method)
    assert found["text"] + "\n" == text
    given = {"name": "longspec", "drafter": str(drafter), "widths": [2, 3]}
    assert found["method"] == {**given, "nodes": None, "gamma": None, "rejection": False}


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
def test_drafters_that_do_not_serve(refused, prompt, drafter, tmp_path, options, reason):
    method = "longspec:" + options.format(tmp=tmp_path, tiny=TINY, drafter=drafter)
    refused(reason, "generate", "--prompt-file", prompt, "--method", method)


def test_a_seed_decides_what_is_sampled(specattn, prompt):
    options = ("--max-new-tokens", 16, "--temperature", 1.5, "--method", "vegas")
    texts = [
        specattn("generate", "--prompt-file", prompt, *options, "--seed", seed)[1]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_filters_and_the_penalty_reach_the_sampler(written):
    penalty = ("--penalty", 1.5, "--penalty-window", 64)
    runs = [
        written("generate", "--max-new-tokens", 12, "--method", "plain", *more)
        for more in (
            ("--temperature", 0),
            ("--temperature", 1, "--min-p", 1.0),  # the best token alone is left
            ("--temperature", 0, *penalty),
            ("--temperature", 1, "--min-p", 1.0, *penalty),
            ("--temperature", 1, "--eta", 0.3),
        )
    ]
    texts = [text for _, text, _ in runs]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    sampling = runs[-1][0]["sampling"]
    assert (sampling["eta_cutoff"], sampling["min_p"], sampling["penalty"]) == (0.3, None, 1.0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--method magic", "got 'magic'"),
        ("--method vegas:gamma=0", "--method: gamma"),
        ("--method vegas:ratio=7", "--method: ratio"),
        ("--method vegas:rows=3", "rows: expected two or all or last,"),
        ("--method vegas:gamma=abc", "gamma: expected an int"),
        ("--method vegas:widths=2", "expected one of gamma"),
        ("--gamma 4", "No such option: --gamma"),
        ("--temperature warm", "got 'warm'"),
        ("--temperature -1", "greater than or equal to 0, got "),
        ("--compile maybe", "'maybe' is not one of 'auto', 'on', 'off'"),
        (f"--seed {2**64}", "--seed"),
        ("--dtype int8", "got 'int8'"),
        ("--device abacus", "abacus"),
        ("--device meta", "meta cannot be used"),
        ("--model {tmp}/none", "none is not a folder, and no Hub id such as"),
        ("--model {tmp}", "no readable config.json: No such file"),
        ("--json {tmp}/none/out.json", "does not exist"),
        ("--prompt-file {tmp}/nowhere.txt", "nowhere.txt is not a file"),
        ("--prompt-file {tmp}/binary", "not UTF-8"),
        ("--prompt-file {prompt}", "is given twice"),
        ("--system short", "give --chat too"),
        ("--chat --last-tokens 3", "leave out --prompt-tokens and --last-tokens"),
        ("--prompt-tokens 3 --last-tokens 3", "not both"),
        ("--show --json -", "--show: standard output is taken by --json -"),
        ("--json {tmp}/a --state {tmp}/./a", "a is the file of --json too"),
        ("--state {tmp}/a --resume {tmp}/b", "leave out --state"),
        (f"--max-new-tokens {10**20}", "--max-new-tokens"),
        (
            "--corpus {prompt} --method plain",
            "--corpus: expected --method auto or suffix, got plain",
        ),
    ],
    ids=lambda value: value if value.startswith("--") else "",
)
def test_user_errors_are_one_line(refused, prompt, tmp_path, arguments, reason):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    given = [word.format(prompt=prompt, tmp=tmp_path) for word in arguments.split()]
    refused(reason, "generate", "--prompt-file", prompt, *given)


def test_a_prompt_is_asked_for(refused):
    refused("--prompt-file", "generate")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "nonesuch"}, "knows no models of type 'nonesuch'"),
        ({"is_encoder_decoder": True}, "an encoder-decoder"),
        ({"kv_lora_rank": 16}, "it has latents (kv_lora_rank), and no qk_rope_head_dim"),
        ({"logit_scale": 0.5}, "differ by 5.0e-01 in their logits"),
        ({"rope_parameters": DYNAMIC, **SHORT}, "'dynamic' turns with the current length"),
        ({"rope_parameters": LONGROPE, **SHORT}, "'longrope' turns with the current length"),
        ({"head_dim": 20}, "head_dim must be a multiple of 8 up to 256, got 20"),
    ],
    ids=["family", "encoder", "latents", "logits", "dynamic", "longrope", "head_dim"],
)
def test_a_model_that_does_not_fit_is_refused(refused, prompt, tmp_path, changes, reason):
    model = with_config(tmp_path / "model", **changes)
    refused(reason, "generate", "--prompt-file", prompt, "--model", model)


def test_a_tested_family_that_is_trusted_is_not_compared(specattn, prompt, tmp_path):
    """Here wrongly so: the model does not scale its logits, whatever its config says."""
    model = with_config(tmp_path / "model", logit_scale=0.5)
    options = ("--prompt-file", prompt, "--method", "plain", "--max-new-tokens", 4)
    assert specattn("generate", *options, "--model", model, "--trust-family")[0] == 0


def test_weights_that_are_not_safetensors_are_refused(refused, prompt, tmp_path):
    model = with_config(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused("no *.safetensors", "generate", "--prompt-file", prompt, "--model", model)


def test_a_text_beyond_the_models_positions_gets_one_warning(specattn, prompt, tmp_path):
    short = with_config(tmp_path / "short", max_position_embeddings=64)
    options = ("--prompt-file", prompt, "--method", "plain", "--max-new-tokens", 8)
    code, text, said = specattn("generate", *options, "--model", short)
    assert code == 0
    assert said.count("go beyond the 64 positions of this model") == 1
    assert specattn("generate", *options)[1] == text


def with_generation(folder, **changes):
    """Change a copy's generation config."""
    config = json.loads((TINY / "generation_config.json").read_text()) | changes
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_a_checkpoints_sampling_is_not_obeyed(specattn, prompt, tmp_path, command):
    """Options alone say how a text is sampled; where it ends, the checkpoint does."""
    model = with_config(tmp_path / "model")
    with_generation(model, do_sample=True, top_p=0.01, min_p=1.0, repetition_penalty=5.0)
    given = (command, "--prompt-file", prompt, "--max-new-tokens", 12, "--method", "plain")
    for options in ((), ("--temperature", 1, "--seed", 4)):
        usual = specattn(*given, *options)[1]
        assert specattn(*given, *options, "--model", model)[:2] == (0, usual)


def test_where_a_text_ends_is_the_checkpoints(written, refused, prompt, tmp_path):
    model, state = with_config(tmp_path / "model"), tmp_path / "state"
    given = ("--model", model, "--max-new-tokens", 12)
    whole, _, _ = written("generate", *given)
    token, string = whole["tokens"][6], whole["text"][5:9]
    with_generation(model, eos_token_id=[0, token])
    found, _, _ = written("generate", *given)
    assert found["finish_reason"] == "stop"
    assert found["tokens"] == whole["tokens"][: whole["tokens"].index(token) + 1]
    # Strings need the tokenizer, which the command has.
    with_generation(model, eos_token_id=[0, token], stop_strings=[string])
    found, text, _ = written("generate", *given, "--state", state)
    assert found["finish_reason"] == "stop"
    assert string in text
    assert len(found["tokens"]) < 12
    reason = "state holds a text that has come to its end"
    refused(reason, "generate", "--prompt-file", prompt, *given, "--resume", state)


def test_use_cache_of_a_checkpoint_is_ignored(specattn, prompt, tmp_path):
    """The cache is our own."""
    model = with_config(tmp_path / "model", use_cache=False)
    with_generation(model, use_cache=False)
    given = ("generate", "--prompt-file", prompt, *FEW)
    assert specattn(*given, "--model", model)[:2] == (0, specattn(*given)[1])
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


def test_more_than_memory_has_room_for_is_refused(refused, prompt):
    given = ("--prompt-file", prompt, "--max-new-tokens", 2**31 - 1)
    refused("no memory for a cache of 1 x 2,147,", "generate", *given, noted=2)


def test_weights_that_end_early_are_refused(refused, prompt, tmp_path):
    model = with_config(tmp_path / "model")
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").unlink()
    for length in (0, 5, 1000, len(content) - 1):
        (model / "model.safetensors").write_bytes(content[:length])
        refused("the weights in ", "generate", "--prompt-file", prompt, "--model", model)


@pytest.mark.parametrize("method", ["longspec:drafter=", "triforce:draft="])
def test_drafters_that_are_not_all_there_are_refused(specattn, prompt, drafter, tmp_path, method):
    folder = tmp_path / "drafter"
    if "triforce" in method:
        broken(folder, lambda weights: weights.pop("model.norm.weight"))
    else:
        shutil.copytree(drafter, folder)
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
def test_outputs_that_are_no_files_are_left_alone(refused, prompt, tmp_path, option):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", os.devnull, tmp_path):
        refused(f"{option}: {path} is ", "generate", "--prompt-file", prompt, option, path)
        refused("and is not replaced", "generate", "--prompt-file", prompt, option, path)
    reason = f"{option}: folder /proc cannot be written to"
    refused(reason, "generate", "--prompt-file", prompt, option, "/proc/out")


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


def test_several_prompts_are_a_batch(specattn, written, refused, prompt, tmp_path):
    other = tmp_path / "other.py"
    other.write_text("import os\nimport sys\n")
    alone = [specattn("generate", "--prompt-file", path, *FEW)[1] for path in (prompt, other)]
    found, text, said = written("generate", "--prompt-file", other, *FEW)
    assert text == "".join(alone)
    assert said.index(f"==> {prompt} <==") < said.index(f"==> {other} <==")
    assert [one["text"] + "\n" for one in found["texts"]] == alone
    assert [one["file"] for one in found["prompts"]] == [str(prompt), str(other)]
    assert len(found["statistics"]["requests"]) == 2
    both = ("--prompt-file", prompt, "--prompt-file", other, "--state", tmp_path / "state")
    refused("keep one text, got 2 prompts", "generate", *both)


def test_a_chat_is_what_the_template_makes_of_it(written, refused, prompt, tmp_path):
    model = with_config(tmp_path / "model")
    prompt.write_text("What is 1 + 1?")
    given = ("generate", *FEW, "--model", model, "--chat")
    reason = "--chat: the model's tokenizer has no chat template"
    refused(reason, *given, "--prompt-file", prompt)
    (model / "chat_template.jinja").write_text(
        "{% for one in messages %}<{{ one.role }}>{{ one.content }}\n{% endfor %}<assistant>"
    )
    for options, start in (((), ""), (("--system", "Be short."), "<system>Be short.\n")):
        prompt.write_text("What is 1 + 1?")
        chat, _, _ = written(*given, *options)
        prompt.write_text(f"{start}<user>What is 1 + 1?\n<assistant>")
        plain, _, _ = written("generate", *FEW)
        assert chat["tokens"] == plain["tokens"]
        assert chat["prompt"] == plain["prompt"]


def test_suffix_takes_corpora(written, prompt):
    pytest.importorskip("specattn._cpu", reason="the C++ kernels are not built")
    options = ("--method", "suffix:nodes=8", "--max-new-tokens", 12)
    alone, _, _ = written("generate", *options)
    beside, _, _ = written("generate", *options, "--corpus", prompt, "--corpus", prompt)
    assert alone["text"] == beside["text"]
    assert beside["method"]["corpus"] == [str(prompt)] * 2

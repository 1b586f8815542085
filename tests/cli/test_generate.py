"""``specattn generate`` as a user types it: what it prints, what it writes, and how it refuses."""

import json

import pytest

from tests.cli.conftest import TINY


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
    assert vegas["method"]["gamma"] == 6
    assert vegas["statistics"]["passes"] <= plain["statistics"]["passes"] == 12
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".py"}  # nothing half written


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
        "gamma": None,
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
        (["--prompt-file", "{prompt}", "--method", "vegas:rows=3"], "rows must be one of two,"),
        (["--prompt-file", "{prompt}", "--method", "vegas:gamma=abc"], "gamma: expected an int"),
        (["--prompt-file", "{prompt}", "--method", "vegas:widths=2"], "expected one of gamma"),
        (["--prompt-file", "{prompt}", "--gamma", "4"], "No such option: --gamma"),
        (["--prompt-file", "{prompt}", "--temperature", "warm"], "temperature"),
        (["--prompt-file", "{prompt}", "--dtype", "int8"], "got 'int8'"),
        (["--prompt-file", "{prompt}", "--device", "abacus"], "abacus"),
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
    [({"model_type": "bert"}, "family 'bert' is not supported")],
    ids=["family"],
)
def test_a_model_that_does_not_fit_is_refused(specattn, prompt, tmp_path, changes, reason):
    model = with_config(tmp_path / "model", **changes)
    code, _, error = specattn("generate", "--prompt-file", prompt, "--model", model)
    assert code == 2
    assert error.count("\n") == 1
    assert reason in error


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

"""The command as a user types it: what it prints, what it writes, and how it refuses."""

import json
import sys
from pathlib import Path

import pytest

from specattn import cli

TINY = Path(__file__).parents[1] / "examples" / "tiny"


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.py"
    path.write_text("def add(left, right):\n    return left + right\n\n\n" * 12)
    return path


@pytest.fixture
def specattn(monkeypatch, capfd):
    """Run the command; return exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["specattn", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capfd.readouterr()

    return run


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
    assert not list(tmp_path.glob("*.partial"))


@pytest.fixture
def drafter(tmp_path):
    """Return a folder with an untrained drafter for the embedded target."""
    from transformers import AutoModelForCausalLM, logging

    from specattn.drafters import LongSpecDrafter

    logging.disable_progress_bar()  # the command does so too, but may not have run in this process
    target = AutoModelForCausalLM.from_pretrained(TINY, dtype="auto")
    LongSpecDrafter.for_target(target, target="tiny").save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_longspec_takes_a_drafter(specattn, prompt, drafter, tmp_path):
    """A tree, and the chain of --gamma beside another method that knows it too."""
    out = tmp_path / "out.json"
    options = ("--prompt-file", prompt, "--drafter", drafter, "--max-new-tokens", 6)
    tree = ("--method", "longspec", "--widths", "2,3", "--json", out)
    code, text, _ = specattn("generate", *options, *tree)
    assert code == 0
    written = json.loads(out.read_text())
    assert written["text"] + "\n" == text
    assert written["method"] == {
        "name": "longspec",
        "drafter": str(drafter),
        "widths": [2, 3],
        "gamma": None,
    }
    methods = ("--methods", "plain,vegas,longspec", "--gamma", 2)
    code, _, figures = specattn("compare", *options, *methods)
    assert code == 0
    assert "identical, token for token: yes" in figures


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--drafter", "{tmp}/none"], "none is not a folder"),
        (["--drafter", str(TINY)], "holds a model of type 'qwen3', not a LongSpec drafter"),
        (["--drafter", "{drafter}", "--widths", "4;4"], "--widths: expected numbers"),
        (["--drafter", "{drafter}", "--widths", "4,0"], "widths must be one or more positive"),
        (["--drafter", "{drafter}", "--gamma", "512"], "window of 512 must be greater"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_drafters_that_do_not_serve(specattn, prompt, drafter, tmp_path, arguments, reason):
    arguments = [word.format(tmp=tmp_path, drafter=drafter) for word in arguments]
    options = ("--prompt-file", prompt, "--method", "longspec", *arguments)
    code, text, error = specattn("generate", *options)
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


def test_filters_and_the_penalty_reach_the_law(specattn, prompt, tmp_path):
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


def test_compare_says_whether_the_outputs_are_identical(specattn, prompt):
    code, _, figures = specattn("compare", "--prompt-file", prompt, "--max-new-tokens", 12)
    assert code == 0
    assert "identical, token for token: yes" in figures
    for row in ("tokens/s", "mean acceptance length", "draft / target / accept"):
        assert row in figures


def test_env_names_every_backend(specattn):
    code, text, _ = specattn("env")
    assert code == 0
    assert all(name in text for name in ("triton", "cpu", "reference"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--prompt-file", "nowhere.txt"], "nowhere.txt is not a file"),
        (["--prompt-file", "{prompt}", "--method", "magic"], "got 'magic'"),
        (["--prompt-file", "{prompt}", "--gamma", "0"], "gamma"),
        (["--prompt-file", "{prompt}", "--ratio", "7"], "ratio"),
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
def test_what_a_user_can_mend_is_one_line(specattn, prompt, tmp_path, arguments, reason):
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


class Clock:
    """Time that passes when it is asked for."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 20.0
        return self.now


SAMPLED = ("--temperature", 1, "--seed", 3)


@pytest.mark.parametrize("sampling", [(), SAMPLED], ids=["greedy", "sampled"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    specattn, prompt, tmp_path, monkeypatch, sampling
):
    """Saved every second round, killed in the middle of a later one."""
    import specattn._long_run as long_run

    monkeypatch.setattr(long_run, "time", Clock())
    state, out = tmp_path / "run.state", tmp_path / "out.json"
    options = ("--prompt-file", prompt, "--method", "plain", "--min-new-tokens", 30, *sampling)
    whole = specattn("generate", *options, "--max-new-tokens", 30)[1]

    class Killed(BaseException):
        pass

    extend = long_run.LongRun.extend

    def killed(self, tokens):
        extend(self, tokens)
        if len(self.tokens) == 17:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(long_run.LongRun, "extend", killed)
        with pytest.raises(Killed):
            specattn("generate", *options, "--max-new-tokens", 30, "--state", state)
    code, text, _ = specattn(
        "generate", *options, "--max-new-tokens", 30, "--resume", state, "--json", out
    )
    assert code == 0
    assert text.endswith(whole)
    run = json.loads(out.read_text())
    assert run["text"] + "\n" == whole
    assert (run["resumed_at"], len(run["tokens"])) == (16, 30)
    assert run["statistics"]["new_tokens"] == 14
    assert run["distinct"] == pytest.approx(
        [
            len({tuple(run["tokens"][i : i + n]) for i in range(31 - n)}) / (31 - n)
            for n in (1, 2, 3, 4)
        ]
    )
    code, _, error = specattn("generate", *options, "--max-new-tokens", 30, "--resume", state)
    assert code == 2
    assert "has 30 tokens, not fewer than 30" in error


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--temperature", "1"], "has temperature 0.0, not 1.0"),
        (["--prompt-tokens", "9"], "continues another prompt"),
        (["--resume", str(TINY / "model.safetensors")], "holds no state of a run"),
        (["--resume", str(TINY / "config.json")], "cannot be read"),
        (["--resume", "/nowhere/state"], "folder /nowhere does not exist"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_a_state_that_does_not_fit_is_refused(specattn, prompt, tmp_path, arguments, reason):
    state = tmp_path / "run.state"
    options = ("--prompt-file", prompt, "--method", "plain", "--max-new-tokens")
    assert specattn("generate", *options, 2, "--state", state)[0] == 0
    code, _, error = specattn("generate", *options, 4, "--resume", state, *arguments)
    assert code == 2
    assert reason in error


def test_an_interrupted_run_shows_what_it_has(specattn, prompt, tmp_path, monkeypatch):
    import signal

    import specattn._long_run as long_run

    out, state = tmp_path / "out.json", tmp_path / "run.state"
    options = ("--prompt-file", prompt, "--method", "plain", "--max-new-tokens", 24)
    whole = specattn("generate", *options)[1]
    extend = long_run.LongRun.extend

    def interrupted(self, tokens):
        extend(self, tokens)
        if len(self.tokens) == 9:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(long_run.LongRun, "extend", interrupted)
        code, text, said = specattn("generate", *options, "--json", out, "--state", state)
    assert code == 130
    assert "Interrupted after 10 of 24 tokens" in said
    run = json.loads(out.read_text())
    assert (run["finish_reason"], len(run["tokens"])) == ("interrupted", 10)
    assert text == run["text"] + "\n"
    assert whole.startswith(run["text"])
    assert specattn("generate", *options, "--resume", state)[1] == whole

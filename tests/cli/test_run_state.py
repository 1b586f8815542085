"""Runs that are interrupted or killed, and go on later: ``--state``, ``--resume`` and Ctrl-C."""

import json
import signal

import pytest
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specattn.cli import run_state
from tests.cli.conftest import TINY, start


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
    specattn, written, refused, prompt, tmp_path, monkeypatch, sampling
):
    """Saved every second round, killed in the middle of a later one."""
    monkeypatch.setattr(run_state, "time", Clock())
    state = tmp_path / "run.state"
    options = ("--method", "plain", "--min-new-tokens", 30, "--max-new-tokens", 30, *sampling)
    given = ("generate", "--prompt-file", prompt, *options)
    whole = specattn(*given)[1]

    class Killed(BaseException):
        pass

    extend = run_state.RunState.extend

    def killed(self, tokens):
        extend(self, tokens)
        if len(self.tokens) == 17:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run_state.RunState, "extend", killed)
        with pytest.raises(Killed):
            specattn(*given, "--state", state)
    run, text, _ = written("generate", *options, "--resume", state)
    assert text.endswith(whole)
    assert run["text"] + "\n" == whole
    assert (run["resumed_at"], len(run["tokens"])) == (16, 30)
    assert run["statistics"]["new_tokens"] == 14
    grams = [[tuple(run["tokens"][i : i + n]) for i in range(31 - n)] for n in (1, 2, 3, 4)]
    assert run["distinct"] == pytest.approx([len({*each}) / len(each) for each in grams])
    refused("has 30 tokens, not fewer than 30", *given, "--resume", state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the options of a run of two tokens, and where it was saved."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "prompt.py").write_text("def add(left, right):\n    return left + right\n" * 12)
    given = ("generate", "--prompt-file", folder / "prompt.py", "--method", "plain")
    with pytest.MonkeyPatch.context() as patch:
        options = ("--max-new-tokens", 2, "--state", folder / "state")
        assert start(patch, *given, *options) == 0
    return given, folder / "state"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--temperature", "1"], "has temperature 0.0, not 1.0"),
        (["--kv-dtype", "int8"], "has kv_dtype None, not 'int8'"),
        (["--prompt-tokens", "9"], "continues another prompt"),
        (["--resume", str(TINY / "model.safetensors")], "holds no state of a run"),
        (["--resume", str(TINY / "config.json")], "cannot be read"),
        (["--resume", "/nowhere/state"], "folder /nowhere does not exist"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_a_state_that_does_not_fit_is_refused(refused, saved, arguments, reason):
    given, state = saved
    refused(reason, *given, "--max-new-tokens", 4, "--resume", state, *arguments, noted=1)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda tensors, _: tensors.pop("tokens"), "cannot be read: File does not contain"),
        (lambda _, metadata: metadata.pop("settings"), "is not as --state writes it: KeyError"),
        (lambda _, metadata: metadata.update(settings="{"), "is not as --state writes it: JSON"),
        (lambda _, metadata: metadata.update(settings="[1]"), "is not as --state writes it: Type"),
        (lambda _, metadata: metadata.update(settings='{"later": 1}'), "has later 1, not None"),
        (
            lambda tensors, _: tensors.update(tokens=tensors["tokens"].float()),
            "tokens: expected ids, int64",
        ),
        (lambda tensors, _: tensors["tokens"].neg_(), "tokens: expected ids, int64"),
        (
            lambda tensors, _: tensors.update(tokens=tensors["tokens"][None]),
            "tokens: expected ids, int64",
        ),
    ],
)
def test_a_state_that_somebody_has_changed_is_refused(refused, saved, tmp_path, damage, reason):
    given, state = saved
    with safe_open(state, "pt") as file:
        tensors, metadata = {}, file.metadata()
        tensors.update((name, file.get_tensor(name)) for name in ("prompt", "tokens"))
    damage(tensors, metadata)
    save_file(tensors, tmp_path / "changed", metadata)
    refused(reason, *given, "--max-new-tokens", 4, "--resume", tmp_path / "changed", noted=1)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_shows_what_it_has(
    specattn, prompt, tmp_path, monkeypatch, number, status
):
    out, state = tmp_path / "out.json", tmp_path / "run.state"
    options = ("--prompt-file", prompt, "--method", "plain", "--max-new-tokens", 24)
    whole = specattn("generate", *options)[1]
    extend = run_state.RunState.extend

    def interrupted(self, tokens):
        extend(self, tokens)
        if len(self.tokens) == 9:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(run_state.RunState, "extend", interrupted)
        code, text, said = specattn("generate", *options, "--json", out, "--state", state)
    assert code == status
    assert "Interrupted after 10 of 24 tokens" in said
    run = json.loads(out.read_text())
    assert (run["finish_reason"], len(run["tokens"])) == ("interrupted", 10)
    assert text == run["text"] + "\n"
    assert whole.startswith(run["text"])
    assert specattn("generate", *options, "--resume", state)[1] == whole


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_before_the_first_token_there_is_nothing_to_show(
    specattn, prompt, tmp_path, monkeypatch, number, status
):
    def interrupted(_):
        signal.raise_signal(number)

    monkeypatch.setattr(run_state.RunState, "__post_init__", interrupted)
    before = signal.getsignal(number)
    state = tmp_path / "run.state"
    code, text, said = specattn("generate", "--prompt-file", prompt, "--state", state)
    assert (code, text) == (status, "")
    assert said.splitlines()[-1] == "specattn: interrupted"
    assert not state.exists()
    assert signal.getsignal(number) is before


def test_a_full_disk_costs_the_state_alone(specattn, prompt, tmp_path, monkeypatch):
    """safetensors' own error, in the middle and at the end: a text is not lost for it."""
    given = ("generate", "--prompt-file", prompt, "--method", "plain", "--max-new-tokens", 5)
    text = specattn(*given)[1]

    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(run_state, "time", Clock())
    monkeypatch.setattr(run_state, "save_file", full)
    code, shown, said = specattn(*given, "--state", tmp_path / "state")
    reason = f"{tmp_path / 'state'} cannot be written: No space left on device"
    assert (code, shown) == (2, text)
    assert f"warning: {reason}\n" in said
    assert said.endswith(f"specattn: error: {reason}\n")

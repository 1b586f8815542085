"""What is continued, where it ends, and what the demo model says of itself."""

from tests.cli.conftest import TINY

FEW = ("--max-new-tokens", 6)


def test_a_prompt_may_stand_in_the_command(specattn, prompt):
    """It is that of a file; several are a batch."""
    text = prompt.read_text()
    expected = specattn("generate", "--prompt-file", prompt, *FEW)[1]
    assert specattn("generate", "--prompt", text, *FEW)[1] == expected
    code, both, said = specattn("generate", "--prompt", text, "--prompt", "import os", *FEW)
    assert code == 0
    assert both.startswith(expected)
    assert "==> --prompt 1 <==" in said
    assert "==> --prompt 2 <==" in said


def test_without_a_prompt_it_says_what_is_missing(refused):
    refused("give --prompt TEXT or --prompt-file FILE", "generate")
    refused("--prompt: expected text, got none", "compare", "--prompt", "")


def test_an_argument_that_is_no_utf8_is_refused(refused):
    """Python hands such bytes on as surrogates, which no tokenizer takes."""
    for option in ("--prompt", "--stop", "--system"):
        given = ("generate", "--prompt", "x", "--chat", option, "caf\udce9")
        refused(f"{option}: expected UTF-8 text, got 'caf", *given)


def test_a_text_ends_behind_a_stop_string(written, specattn, prompt, tmp_path):
    """By every method, and a saved run knows it."""
    whole, _, _ = written("generate", "--max-new-tokens", 40, "--method", "plain")
    stop = whole["text"][12:15]
    end = whole["text"].index(stop) + len(stop)
    for method in ("plain", "suffix"):
        given = ("--max-new-tokens", 40, "--method", method, "--stop", "never met", "--stop", stop)
        found, _, _ = written("generate", *given)
        assert found["finish_reason"] == "stop"
        assert whole["text"].startswith(found["text"])
        assert end <= len(found["text"]) < end + 8, "a token may go on behind it"
    state = tmp_path / "state"
    given = ("generate", "--prompt-file", prompt, "--method", "plain", "--stop", "never met")
    assert specattn(*given, "--max-new-tokens", 3, "--state", state)[0] == 0
    code, _, said = specattn(*given[:-2], "--max-new-tokens", 5, "--resume", state)
    assert code == 2
    assert "stop" in said
    assert "--stop: expected text, got none" in specattn(*given[:-1], "")[2]


def test_the_demo_model_says_that_it_is_one(specattn, prompt, tmp_path):
    given = ("--prompt-file", prompt, "--max-new-tokens", 2, "--method", "plain")
    for command in ("generate", "compare"):
        assert specattn(command, *given)[2].count("The model is a demo") == 1
    (own := tmp_path / "own").mkdir()
    for file in (*TINY.glob("*.json"), *TINY.glob("*.safetensors")):
        (own / file.name).symlink_to(file)
    assert "demo" not in specattn("generate", *given, "--model", own)[2]

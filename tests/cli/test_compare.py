"""``specattn compare`` as a user types it."""

import json
import signal

import pytest

from specattn.cli import run_state


def test_compare_says_whether_the_outputs_are_identical(specattn, prompt):
    code, _, figures = specattn("compare", "--prompt-file", prompt, "--max-new-tokens", 12)
    assert code == 0
    assert "identical, token for token: yes" in figures
    for column in ("tokens/s", "mean acceptance length", "draft / target / accept"):
        assert column in figures


def test_every_method_has_options_of_its_own(specattn, prompt, drafter):
    methods = [
        "plain",
        "vegas:gamma=2",
        f"longspec:gamma=3,drafter={drafter}",
        "longspec:widths=[2,2]",
    ]
    code, _, figures = specattn(
        "compare", "--prompt-file", prompt, "--max-new-tokens", 6, "--methods", ",".join(methods)
    )
    assert code == 0
    assert "identical, token for token: yes" in figures
    for name in ("vegas:gamma=2", "longspec:widths=[2,2]"):
        assert f"\n{name} " in figures


def test_the_option_that_is_wrong_is_named(specattn, prompt):
    methods = ("--methods", "plain,vegas:gamma=0")
    code, text, error = specattn("compare", "--prompt-file", prompt, *methods)
    assert (code, text) == (2, "")
    assert error.startswith("specattn: error: Invalid value: --methods: gamma must be at least 1")
    assert error.count("\n") == 1


def test_a_method_has_a_line_of_its_own_on_eighty_columns(specattn, prompt):
    methods = (
        "plain,vegas,vegas:switch=false,streaming,quest,specextend,longspec:widths=[2,2,2],poss,"
        "medusa,prompt_lookup,token_recycling:nodes=40,depth=4"
    )
    code, _, figures = specattn(
        "compare", "--prompt-file", prompt, "--max-new-tokens", 6, "--methods", methods
    )
    assert code == 0
    table = figures[figures.index("tokens/s") : figures.index("method ", figures.index("tokens/s"))]
    lines = table.splitlines()
    assert len(lines) == 1 + 11
    assert max(map(len, figures.splitlines())) <= 80


@pytest.mark.parametrize("when", ["before its first token", "in its text"])
def test_an_interrupted_comparison_judges_nothing(specattn, prompt, tmp_path, monkeypatch, when):
    """Ctrl-C in the second of three methods."""
    out, calls = tmp_path / "out.json", []
    name, at = ("extend", 10) if when == "in its text" else ("__post_init__", 2)
    original = getattr(run_state.RunState, name)

    def interrupted(self, *arguments):
        original(self, *arguments)
        calls.append(name)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run_state.RunState, name, interrupted)
    code, _, said = specattn(
        "compare", "--prompt-file", prompt, "--max-new-tokens", 8, "--json", out,
        "--methods", "plain,prompt_lookup:gamma=1,medusa",
    )  # fmt: skip
    assert code == 130
    assert "identical" not in said
    assert "\nplain " in said
    assert "medusa" not in said
    written = json.loads(out.read_text())
    assert written["identical"] is None
    lengths = [len(run["tokens"]) for run in written["runs"]]
    assert lengths[0] == 8
    assert len(lengths) == (2 if when == "in its text" else 1)
    assert f"Interrupted; {len(lengths)} of 3 methods have run." in said


def test_json_has_every_run(specattn, prompt):
    options = ("--prompt-file", prompt, "--max-new-tokens", 5, "--methods", "plain,vegas:gamma=2")
    code, text, said = specattn("compare", *options, "--json", "-")
    assert code == 0
    written = json.loads(text)
    assert written["schema"] == "specattn.compare/1"
    assert written["identical"] is True
    plain, vegas = written["runs"]
    assert (plain["method"]["name"], vegas["method"]["gamma"]) == ("plain", 2)
    assert plain["tokens"] == vegas["tokens"]
    assert plain["statistics"]["new_tokens"] == 5
    assert "\nplain " in said

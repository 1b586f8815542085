"""The decoding benchmark: its command, its files, and rows that nobody should trust refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import run_decoding  # noqa: E402
from common.records import row_key  # noqa: E402
from decoding import measure as measure_module  # noqa: E402
from decoding import models, session  # noqa: E402
from decoding.cases import UNSHAPED, Entry, Group, Shaping  # noqa: E402
from decoding.session import SCHEMA, begun  # noqa: E402
from decoding.targets import MARK  # noqa: E402

from specattn.widening import embedded  # noqa: E402

FIGURES = {
    *("tokens_per_second", "prefill_seconds", "rounds", "tau", "tau_without_bonus"),
    *("acceptance_rate", "per_position_acceptance", "conditional_acceptance", "round_seconds"),
    *("speedup", "peak_bytes", "graph_bytes", "identity", "others", "peer"),
    *("first_token_seconds", "distinct", "details", "lengths"),
}
KNOWN = {
    *("kind", "section", "model", "method", "settings", "context", "batch", "temperature"),
    *("shaping", "new_tokens", "acceptance", "beyond_positions", "fault"),
}
SHAPE = ["--shape", "tiny", "--layers", "1", "--random-weights", "--acceptance", "0.9,0.5"]
VEGAS = ["--method", "vegas:gamma=3,min_tokens=16"]
SMALL = ["--device", "cpu", "--context", "48", "--new-tokens", "6", "--repeats", "1", *VEGAS]


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch):
    """A buffer of a few megabytes to flush with: what is timed does not matter here."""
    monkeypatch.setattr("common.clock.last_level_cache", lambda device: 1 << 18)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.py"
    path.write_text("def add(a, b):\n    return a + b\n\n\n" * 40)
    return ["--prompt", str(path), "--texts", "1"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_small_run_prints_a_table_and_writes_valid_json_lines(text, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    arguments = [*SMALL, *text, "--temperature", "0,1", "--batch", "2", "--json", str(path)]
    assert run_decoding.main([*arguments, "--pictures", str(tmp_path / "png")]) == 0
    run, *rows = lines(path)
    assert run["schema"] == SCHEMA
    assert run["acceptance"] == "measured"
    assert run["model"]["weights"] == "checkpoint"
    assert run["model"]["shape"]["layers"] == run["model"]["layers"]
    assert [row["method"] for row in rows] == ["plain", "transformers", "vegas"] * 2
    for row in rows:
        assert set(row) == KNOWN | FIGURES
        assert row["fault"] is None
        assert row["tokens_per_second"]["median"] > 0
        assert row["acceptance"] == "measured"
        assert row["peak_bytes"] is None or row["peak_bytes"] > 1 << 20
        compared = row["temperature"] == 0 and row["method"] != "plain"
        assert (row["identity"] is not None) == compared
        if compared:
            assert row["identity"] == {"compared": row["batch"], "differences": []}
        if row["method"] == "transformers":
            assert row["tau"] is row["rounds"] is row["round_seconds"] is None
            continue
        seconds = row["round_seconds"]
        assert seconds["total"] == pytest.approx(
            seconds["draft"] + seconds["target"] + seconds["accept"]
        )
        assert row["tau_without_bonus"] == pytest.approx(row["tau"] - 1)
        assert row["first_token_seconds"] > row["prefill_seconds"] > 0
    assert rows[2]["speedup"].keys() == {"plain", "transformers"}
    assert rows[2]["settings"] == {"gamma": 3, "min_tokens": 16}
    printed = capsys.readouterr().out
    assert "pos-acc" in printed
    assert MARK not in printed
    assert {png.name for png in (tmp_path / "png").iterdir()} == {"speed.png", "acceptance.png"}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_widened_target_is_made_once_and_measured_by_all_that_it_is_for(
    text, tmp_path, monkeypatch, whole
):
    """Not the whole run: with the embedded target where the widened one would be."""
    monkeypatch.setattr(models, "WIDE", tmp_path / "wide")
    if whole:
        monkeypatch.setitem(models.MODELS, "qwen3-0.6b", replace(models.MODELS["tiny"], layers=7))
    else:
        tiny = embedded.EMBEDDED["tiny"]
        monkeypatch.setattr(embedded, "widen", lambda _, folder, *sizes: folder.symlink_to(tiny))
    path = tmp_path / "rows.jsonl"
    wide = ["--device", "cpu", *text, "--wide", "qwen3-0.6b", "--no-peer", "--temperature", "0"]
    wide += ["--context", "48", "--new-tokens", "6" if whole else "2", "--repeats", "1"]
    assert run_decoding.main([*wide, "--json", str(path)]) == 0
    run, *rows = lines(path)
    assert run["model"]["name"] == "wide qwen3-0.6b"
    assert run["model"]["layers"] == (7 if whole else 6)
    methods = ["plain", "auto", "suffix", "vegas", "longspec", "poss"]
    methods += ["eagle3", "tokenswift", "medusa"]
    assert [row["method"] for row in rows] == methods
    assert all(row["fault"] is None for row in rows)
    assert all(row["identity"]["differences"] == [] for row in rows[1:])
    monkeypatch.setattr(embedded, "widen", None)
    assert models.widened("qwen3-0.6b") == tmp_path / "wide" / "qwen3-0.6b"


def test_simulated_acceptance_is_said_in_every_line(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    options = ["--json", str(path), "--passes", "--budget", "0.01", "--pictures", str(tmp_path)]
    options += ["--method", "poss:depth=2,total_tokens=8"]
    assert run_decoding.main([*SMALL, *SHAPE, "--temperature", "0", *options]) == 0
    captured = capsys.readouterr()
    for line in [*captured.out.splitlines(), *captured.err.splitlines()]:
        assert line.startswith(f"{MARK} 0.9,0.5 |")
    records = lines(path)
    assert {record["kind"] for record in records} == {"run", "row", "pass"}
    assert all(record["acceptance"] == f"{MARK} 0.9,0.5" for record in records)
    rows = [record for record in records if record["kind"] == "row"]
    assert all(row["prefill_seconds"] is row["identity"] is row["fault"] is None for row in rows)
    assert 1 < rows[-1]["tau"] < 3, "a random drafter's tree is its own, what survives is drawn"


def test_what_was_measured_of_a_group_is_kept(text, tmp_path, monkeypatch, capsys):
    """A time limit ends a run in the middle of its methods."""
    path = tmp_path / "rows.jsonl"
    methods = ["--method", "prompt_lookup", "--method", "suffix", "--json", str(path)]
    runs = []

    def stop_at_the_last(snapshot, method, *options):
        runs.append(method)
        if len(runs) == 7:  # after a warm-up of all four
            raise KeyboardInterrupt
        return run(snapshot, method, *options)

    run = measure_module.run
    monkeypatch.setattr(measure_module, "run", stop_at_the_last)
    options = ["--context", "32", "--temperature", "0", "--texts", "1", "--repeats", "1"]
    options += ["--no-peer", *methods]
    assert run_decoding.main([*SMALL, *text, *options]) == 130
    assert "2 rows are kept" in capsys.readouterr().err
    rows = [record for record in lines(path) if record["kind"] == "row"]
    assert [row["method"] for row in rows] == ["plain", "vegas"]
    assert rows[1]["speedup"]["plain"] > 0
    assert rows[1]["identity"]["compared"] == 1


def test_an_interrupted_run_goes_on_to_the_same_rows(text, tmp_path, monkeypatch, capsys):
    contexts = ["--context", "32,48,64", "--temperature", "0"]
    whole, path = tmp_path / "whole.jsonl", tmp_path / "rows.jsonl"
    assert run_decoding.main([*SMALL, *text, *contexts, "--json", str(whole)]) == 0

    def stop_at_64(model, texts, group, *rest):
        if group.context == 64:
            raise KeyboardInterrupt
        return measure_module.measure(model, texts, group, *rest)

    monkeypatch.setattr(session, "measure", stop_at_64)
    assert run_decoding.main([*SMALL, *text, *contexts, "--json", str(path)]) == 130
    assert "6 rows are kept" in capsys.readouterr().err
    kept = lines(path)
    with path.open("a") as file:
        file.write('{"kind": "row", "meth')  # as if the machine had died in the middle of a line

    monkeypatch.undo()
    before = path.read_text()
    for changed, named in (
        ([], "continue it with --resume"),
        (["--resume", "--new-tokens", "7"], "measured with another plan"),
        (["--resume", "--dtype", "bfloat16"], "measured with another model"),
    ):
        with pytest.raises(SystemExit) as stop:
            run_decoding.main([*SMALL, *text, *contexts, "--json", str(path), *changed])
        assert stop.value.code == 2
        assert named in capsys.readouterr().err
    assert path.read_text() == before
    assert run_decoding.main([*SMALL, *text, *contexts, "--json", str(path), "--resume"]) == 0
    again = lines(path)
    assert again[: len(kept)] == kept
    assert [record["kind"] for record in again[len(kept) :]] == ["run", "row", "row", "row"]
    assert [row_key(row) for row in again if row["kind"] == "row"] == [
        row_key(row) for row in lines(whole) if row["kind"] == "row"
    ]


@pytest.mark.parametrize("stored", [{"quantize": "int4"}, {"kv_dtype": "fp8"}])
def test_fewer_bits_are_measured_and_said(text, tmp_path, capsys, stored):
    path = tmp_path / "rows.jsonl"
    ((name, kind),) = stored.items()
    arguments = [*SMALL, *text, "--temperature", "0", "--context", "40", "--json", str(path)]
    arguments += ["--method", "suffix", "--no-peer"]
    assert run_decoding.main([*arguments, f"--{name.replace('_', '-')}", kind]) == 0
    run, *rows = lines(path)
    assert run["model"].items() >= stored.items()
    assert all(row.items() >= stored.items() and row["fault"] is None for row in rows)
    assert rows[1]["identity"] == {"compared": 1, "differences": []}
    assert f"{name} {kind}, " in capsys.readouterr().out
    with pytest.raises(SystemExit):  # rows of the model's own type are another run's
        run_decoding.main([*arguments, "--resume"])
    assert "measured with another model" in capsys.readouterr().err


def test_rows_of_another_distribution_or_machine_are_other_rows(tmp_path):
    groups = [Group(24, 1, 1.0, (Entry("plain"),), one) for one in (UNSHAPED, Shaping(penalty=1.3))]
    free, shaped = ({"section": "", **one.record(one.entries[0])} for one in groups)
    assert (free["shaping"], shaped["shaping"]) == ({}, {"penalty": 1.3})
    assert row_key(free) != row_key(shaped)
    run = {"kind": "run", **dict.fromkeys(session._SAME), "schema": SCHEMA, "machine": {"name": 1}}
    path = tmp_path / "rows.jsonl"
    begun(path, run, resume=False).add(free)
    assert len(begun(path, run, resume=True).rows) == 1
    with pytest.raises(ValueError, match="measured with another machine"):
        begun(path, run | {"machine": {"name": 2}}, resume=True)


def test_text_that_is_not_plain_decodings_is_not_hidden(text, monkeypatch, tmp_path, capsys):
    def wrong(target, method, *rest):
        outcome = right(target, method, *rest)
        if method.max_nodes > 1:
            outcome.tokens[0][3] = (outcome.tokens[0][3] + 1) % 4096
        return outcome

    right = measure_module.run
    monkeypatch.setattr(measure_module, "run", wrong)
    path = tmp_path / "rows.jsonl"
    arguments = [*SMALL, *text, "--temperature", "0", "--no-peer", "--json", str(path)]
    assert run_decoding.main(arguments) == 1
    difference = lines(path)[-1]["identity"]["differences"][0]
    assert difference["position"] == 3
    assert not difference["near_tie"]
    captured = capsys.readouterr()
    assert "NO in 1 of 1" in captured.out
    assert "NOT A NEAR-TIE" in captured.out
    assert "no tie explains it" in captured.err


def test_a_method_that_fails_costs_only_its_own_row(text, monkeypatch, tmp_path, capsys):
    def fail(target, method, *rest):
        if method.max_nodes > 1:
            raise RuntimeError("no such instruction\nand much more")
        return right(target, method, *rest)

    right = measure_module.run
    monkeypatch.setattr(measure_module, "run", fail)
    path = tmp_path / "rows.jsonl"
    arguments = [*SMALL, *text, "--temperature", "0", "--json", str(path)]
    assert run_decoding.main(arguments) == 1
    _, plain, peer, vegas = lines(path)
    assert plain["fault"] is peer["fault"] is None
    assert vegas["fault"] == "RuntimeError: no such instruction"
    assert set(vegas) == KNOWN
    captured = capsys.readouterr()
    assert "FAILED" in captured.out
    assert "no such instruction" in captured.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--method", "beam"], "expected one of cast, dflash, jetflow, eagle3"),
        (["--method", "vegas:width=3"], "expected one of gamma, ratio"),
        (["--method", "vegas:gamma=0"], "gamma must be at least 1"),
        (["--method", "plain:gamma=2"], "expected no option"),
        (["--model", "/nowhere"], "--model: /nowhere"),
        (["--prompt", "/nowhere.py"], "--prompt: /nowhere.py"),
        (["--prompt", __file__, "--context", "64k"], "give more with --prompt"),
        (["--context", "8q"], "--context"),
        (["--temperature", "-1"], "--temperature"),
        (["--new-tokens", "1"], "--new-tokens: expected 2 or more"),
        (["--suite", "beam"], "expected one of vegas, longspec"),
        (["--suite", "vegas", "--context", "1k,2k"], "one --context"),
        (["--suite", "grounded", *SHAPE], "needs a model that reads its texts"),
        (["--suite", "grounded", "--context", "1k", "--new-tokens", "2k"], "a reference has"),
        (["--suite", "grounded", "--context", "1m", "--new-tokens", "9"], "hold"),
        (["--shape", "tiny"], "belong together"),
        (["--shape", "gpt-9"], "gpt-9"),
        (["--acceptance", "0.9"], "belong together"),
        (["--layers", "2"], "--layers needs --shape"),
        (["--wide", "gpt-9"], "gpt-9"),
        (["--wide", "qwen3-0.6b", "--model", "out"], "--wide is a model"),
        ([*SHAPE, "--quantize", "int8"], "--shape: no --quantize, no --kv-dtype"),
        (["--kv-dtype", "int8", "--peer", "transformers"], "expected no --kv-dtype"),
        ([*SHAPE[:-1], "1.5"], "rates from 0 to 1"),
        ([*SHAPE[:-1], "medusa"], "expected vegas-qwen3-8b"),
        ([*SHAPE, "--prompt", "x.py"], "no --prompt"),
        (["--json", "/nowhere/rows.jsonl"], "/nowhere does not exist"),
        (["--resume"], "--resume needs --json"),
        (["--fast"], "--fast"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_2(arguments, named, capsys):
    with pytest.raises(SystemExit) as stop:
        run_decoding.main(["--device", "cpu", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_what_leaves_the_models_positions_is_measured_and_marked(
    text, monkeypatch, tmp_path, capsys
):
    def of_fifty_positions(*rest):
        model, tokenizer = right(*rest)
        model.config.max_position_embeddings = 50
        return model, tokenizer

    right = run_decoding.models.checkpoint
    monkeypatch.setattr(run_decoding.models, "checkpoint", of_fifty_positions)
    path = tmp_path / "rows.jsonl"
    arguments = [*SMALL, *text, "--temperature", "0", "--no-peer", "--json", str(path)]
    assert run_decoding.main([*arguments, "--context", "40,48"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("warning: some contexts and their new tokens go beyond the 50") == 1
    rows = [(row["context"], row["beyond_positions"]) for row in lines(path)[1:]]
    assert rows == [(40, False), (40, False), (48, True), (48, True)]

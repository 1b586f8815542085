"""Other engines as peers: their processes, their place in a run, and what is refused."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import engines as engines_script  # noqa: E402
import run_decoding  # noqa: E402
from common.records import label as row_label  # noqa: E402
from decoding.cases import Entry  # noqa: E402
from decoding.peers import engines, process  # noqa: E402
from decoding.peers.engines import ENGINES, WORKERS, Engine  # noqa: E402
from decoding.peers.process import Answer, Peer, Peers  # noqa: E402

from specattn.machine_load import used_by  # noqa: E402

FAKE = f"""
import os, sys, time
sys.path.insert(0, {str(WORKERS)!r})
from protocol import serve

class Fake:
    version = "1.2"

    def __init__(self, settings):
        if settings.get("broken"):
            raise MemoryError("no room")
        self.settings, self.forgotten = settings, 0

    def forget(self):
        self.forgotten += 1

    def generate(self, prompt, new_tokens):
        print("a library's chatter")
        if prompt[0] == 13:
            raise LookupError("thirteen")
        if prompt[0] == 7:
            os._exit(3)
        for at in range(0, new_tokens, 2):
            time.sleep(0.01)
            yield [prompt[0], self.forgotten][: new_tokens - at]
        if prompt[0] == 5:
            yield [0]

    def texts(self, prompts, new_tokens):
        return [[prompt[0]] * new_tokens for prompt in prompts]

serve(Fake)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """An engine with a virtual environment, whose worker counts how often it had to forget."""
    monkeypatch.setattr(engines, "REPOSITORY", tmp_path)
    monkeypatch.setattr(process, "FOLDER", tmp_path / "peers")
    python = tmp_path / ".venv-fake" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    worker = tmp_path / "fake_worker.py"
    worker.write_text(FAKE)
    return Engine("fake", worker, lambda *_: {}, ("float32",), {"width": "tokens"})


@pytest.fixture
def peers():
    with Peers(Path("model"), "float32", threads=1, capacity=64) as started:
        yield started


def test_an_option_is_a_number_or_one_of_its_words():
    llama_cpp = ENGINES["llama.cpp"]
    assert llama_cpp.parse("weights=q8_0,ngram=7") == {"weights": "q8_0", "ngram": 7}
    assert ENGINES["vllm"].parse("ngram=7") == {"ngram": 7}
    for engine, text in (
        (llama_cpp, "weights=3"),
        (llama_cpp, "ngram=few"),
        (ENGINES["vllm"], "ngram=0"),
    ):
        with pytest.raises(ValueError, match=r"weights=q8_0\|q4_0|ngram=N"):
            engine.parse(text)


def test_a_worker_answers_with_tokens_and_when_they_came(fake, peers):
    peer = peers.get(fake, "fake width=2", fake.parse("width=2"))
    assert peer is peers.get(fake, "fake width=2", {})
    assert peer.ready["version"] == "1.2"
    assert peer.generate([3, 4], 5).tokens == [3, 0, 3, 0, 3]
    answer = peer.generate([3, 4], 5, cold=True)
    assert answer.tokens == [3, 1, 3, 1, 3]
    assert [count for _, count in answer.arrivals] == [2, 4, 5]
    times = [at for at, _ in answer.arrivals]
    assert times == sorted(times)
    assert answer.first_seconds == times[0] >= 0.01
    assert "a library's chatter" in peer.log.read_text()


def test_the_first_pass_is_not_in_the_rate():
    answer = Answer([0] * 9, [(5.0, 2), (5.5, 4), (7.0, 9)])
    assert answer.first_seconds == 5.0
    assert answer.tokens_per_second == 7 / 2


@pytest.mark.parametrize(
    ("prompt", "said"),
    [(13, "LookupError: thirteen"), (5, "expected 4 tokens, got 5"), (7, "ended with status 3")],
)
def test_a_fault_of_a_worker_says_what_and_where_its_log_is(fake, peers, prompt, said):
    peer = peers.get(fake, "fake", {})
    with pytest.raises(RuntimeError, match=said) as fault:
        peer.generate([prompt], 4)
    assert str(peer.log) in str(fault.value)
    peers.__exit__()
    assert peer.process.returncode == (3 if prompt == 7 else 0), "closing ends it"


def test_processor_time_of_a_process_is_counted():
    before, end = used_by(os.getpid()), time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert used_by(os.getpid()) - before >= 0.08
    assert used_by(2**30) == 0


@pytest.fixture
def small(tmp_path):
    """Return a short run's arguments and where its rows are written."""
    text, rows = tmp_path / "text.py", tmp_path / "rows.jsonl"
    text.write_text("def add(a, b):\n    return a + b\n\n\n" * 40)
    sizes = ["--context", "48", "--new-tokens", "6", "--repeats", "2", "--texts", "1"]
    asked = ["--device", "cpu", "--temperature", "0", "--peer", "vllm", "--method", "plain"]
    given = ["--method", "vegas:min_tokens=16", "--prompt", str(text), "--json", str(rows)]
    return [*asked, *sizes, *given], rows


def test_a_peer_is_a_row_and_every_row_has_its_ratio(fake, small, monkeypatch, capsys):
    monkeypatch.setitem(ENGINES, "vllm", replace(fake, options={"ngram": "tokens"}))
    arguments, path = small
    assert run_decoding.main([*arguments, "--peer", "vllm:ngram=2"]) == 0
    _, *rows = map(json.loads, path.read_text().splitlines())
    found = {row_label(row): row for row in rows}
    assert list(found) == ["vllm", "vllm ngram=2", "plain", "vegas min_tokens=16"]
    for label, row in found.items():
        assert row["speedup"].keys() == {"plain", "vllm", "vllm ngram=2"} - {label}
        assert row["first_token_seconds"] >= row["prefill_seconds"] > 0
    peer = found["vllm"]
    assert peer["peer"]["version"] == "1.2"
    assert found["plain"]["peer"] is None
    assert peer["prefill_seconds"] == peer["first_token_seconds"] > 0.01
    assert (peer["rounds"], peer["tau"]) == (6, 2.0)  # two runs of three passes
    # The fake's text is nonsense: that is shown, and is no fault of ours.
    assert peer["identity"]["compared"] == len(peer["identity"]["differences"]) == 1
    printed = capsys.readouterr().out
    assert "x vllm ngram=2" in printed
    assert "NO in 1 of 1" in printed


def test_a_peer_that_does_not_start_costs_only_its_own_row(fake, small, monkeypatch, capsys):
    fake.worker.write_text("raise SystemExit(4)")
    monkeypatch.setitem(ENGINES, "vllm", fake)
    arguments, path = small
    assert run_decoding.main(arguments) == 1
    _, peer, plain, vegas = map(json.loads, path.read_text().splitlines())
    assert "vllm: it ended with status 4; its log is" in peer["fault"]
    assert plain["fault"] is vegas["fault"] is None
    assert "ended with status 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--peer", "beam"], "--peer: expected one of transformers, vllm, llama.cpp, got 'beam'"),
        (["--peer", "vllm:width=3"], "--peer vllm: expected ngram=N"),
        (["--peer", "vllm:ngram=0"], "--peer vllm: expected ngram=N"),
        (["--peer", "llama.cpp:ngram=0"], "--peer llama.cpp: expected weights=q8_0|q4_0"),
        (["--peer", "transformers:x=3"], "--peer transformers: expected no option"),
        (["--peer", "vllm"], "run `make vllm`"),
        (["--peer", "llama.cpp"], "run `make llama-cpp`"),
        (["--peer", "vllm", "--temperature", "0,1"], "expected --temperature 0"),
        (["--peer", "vllm", "--batch", "2"], "expected --batch 1"),
        (["--peer", "vllm", "--suite", "vegas"], "expected no --suite"),
        (["--peer", "llama.cpp", "--dtype", "float16"], "expected --dtype float32 or bfloat16"),
    ],
)
def test_what_a_peer_cannot_do_is_refused(arguments, named, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(engines, "REPOSITORY", tmp_path)  # where nothing is installed
    with pytest.raises(SystemExit) as stop:
        run_decoding.main(["--device", "cpu", "--temperature", "0", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("text", ["vllm", "vllm:ngram=3", "llama.cpp", "llama.cpp:ngram=3"])
def test_an_engine_decodes_what_plain_decoding_does_and_rests_between(text, small):
    name = text.partition(":")[0]
    if reason := ENGINES[name].why_not():
        pytest.skip(reason)
    arguments, path = small
    arguments = [text if one == "vllm" else one for one in arguments]
    assert run_decoding.main(arguments) == 0
    _, row, *_ = map(json.loads, path.read_text().splitlines())
    assert row["identity"] == {"compared": 1, "differences": []}
    assert row["tau"] >= 1
    with Peers(run_decoding.EMBEDDED_TARGET, "float32", threads=1, capacity=64) as started:
        entry = Entry.parse_peer(text)
        peer: Peer = started.get(ENGINES[name], entry.label, entry.options)
        time.sleep(0.5)
        before = used_by(peer.pid)
        time.sleep(1.0)
        assert used_by(peer.pid) - before <= 0.05


def test_vllm_with_the_plugin_is_held_against_vllm_as_it_is(fake, tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    pair = {"vLLM": (fake, {}), "specattn": (fake, {})}
    for name, value in (("STOCK", fake), ("QUICK", 64), ("COMPARED", {"plain": pair})):
        monkeypatch.setattr(engines_script, name, value)
    monkeypatch.setattr(engines_script, "DRAFTERS", {})
    small = "--quick --check identity --check plain --context 48,64 --repeats 2 --new-tokens 4"
    assert engines_script.main([*small.split(), "--threads", "1", "--json", str(path)]) == 0
    run, texts, *timed = map(json.loads, path.read_text().splitlines())
    assert run["schema"] == "specattn.engines/1"
    assert (texts["check"], texts["context"], texts["identical"], texts["of"]) == (
        *("identity", 64),
        *(40, 40),
    )
    assert [(row["check"], row["context"], row["variant"]) for row in timed] == [
        ("plain", context, "specattn") for context in (48, 64)
    ]
    assert all(row["ratio"] > 0 and row["seconds"] > 0 for row in timed)
    assert "40 of 40" in capsys.readouterr().out

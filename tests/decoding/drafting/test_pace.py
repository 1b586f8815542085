"""Drafts that size themselves, on machines that are made up: as fast as the best given size."""

from itertools import accumulate
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList

from specattn.decoding import METHODS, generate
from specattn.decoding.drafting.costs import Ledger
from specattn.decoding.drafting.gains import Effort
from specattn.decoding.drafting.pacer import Choice, Pacer
from tests.decoding.drafting import machines
from tests.decoding.drafting.machines import Machine, compared, embedded, snapshot_of, texts
from tests.decoding.models import prompts, tiny_model

DEAR = machines.MACHINES["toy"] | {"passes": {n: 1.5 * n for n in (1, 2, 65)}}


@pytest.fixture(scope="module")
def snapshots():
    model, tokenizer = embedded()
    kept = {}

    def of(kind, batch=1):
        if (kind, batch) not in kept:
            prompt = texts(tokenizer, 512)[kind]
            kept[kind, batch] = snapshot_of(model, [prompt] * batch, 160)
        return kept[kind, batch]

    return of


@pytest.mark.parametrize(  # EAGLE-3's trees are grown as PosS' are
    "method", ["poss", "longspec", pytest.param("eagle3", marks=pytest.mark.slow)]
)
def test_an_h100_drafts_by_itself_as_fast_as_with_the_best_size(snapshots, method):
    """Graphs that are captured for 0.6 s are no costs of a round; 96 tokens, greedily."""
    few = {method: machines.FIXED[method][2:5]}
    with patch.object(machines, "FIXED", few):
        found = compared(snapshots("code"), "h100", ["plain", method], 96, 0)
    fixed = max(speed for (_, options), speed in found.items() if options.startswith("{"))
    assert found[method, "self"] >= 0.9 * fixed
    assert found[method, "self"] >= 1.8 * found["plain", "{}"]


def test_eight_requests_on_an_h100_stay_within_what_is_replayed(snapshots):
    """More than 128 rows take 80 ms there: no pass has them, and none loses to plain decoding."""
    rows, real = [], Machine.run_pass

    def noted(machine, count, capture):
        rows.append(count)
        real(machine, count, capture)

    with patch.object(Machine, "run_pass", noted), patch.object(machines, "FIXED", {"poss": []}):
        found = compared(snapshots("code", 8), "h100 x8", ["plain", "poss"], 24, 0)
    assert max(rows) <= 128
    assert found["poss", "self"] >= 0.98 * found["plain", "{}"]


@pytest.mark.parametrize("method", ["poss", "suffix", "auto", "vegas"])
def test_trying_takes_a_small_share_where_drafts_never_pay(snapshots, method, monkeypatch):
    """Rows are as dear as rounds: that costs an eighth of the first 150 tokens at most."""
    monkeypatch.setitem(machines.MACHINES, "dear", DEAR)
    snapshot, machine = snapshots("prose"), Machine("dear")
    machines.forget(snapshot)
    with machine.at_work():
        found = machines.speed(snapshot, machine, METHODS[method](), 150, 1)
    plain = 1 / (1.55e-3)
    assert found.tokens_per_second >= 0.88 * plain
    assert found.total.mean_acceptance_length < 1.2


def test_where_nothing_pays_most_rounds_ask_for_nothing(snapshots, monkeypatch):
    """A lookup takes 0.1 ms, a round 1.55. What is written meanwhile is read, and texts stay."""
    monkeypatch.setitem(machines.MACHINES, "dear", DEAR)
    snapshot, asked, real = snapshots("prose"), [], Pacer.prepare
    machines.forget(snapshot)

    def prepare(self, root):
        real(self, root)
        asked.append(not self.resting)

    def run(method):
        return snapshot.run(METHODS[method](), 150, LogitsProcessorList(), do_sample=True, seed=7)

    with Machine("dear").at_work(), patch.object(Pacer, "prepare", prepare):
        texts = [run(method)[0] for method in ("plain", "auto")]
    assert texts[0] == texts[1]
    assert len(asked) > 120
    assert 10 < sum(asked) < 0.5 * len(asked)


@pytest.mark.parametrize("seed", range(4))
def test_slow_rounds_end_no_drafting(snapshots, seed):
    """On a machine that others disturb, from its first round on."""
    snapshot, found = snapshots("prose"), []
    for method in ("plain", "auto"):
        machines.forget(snapshot)
        machine = Machine("0.6b", seed)
        with machine.at_work():
            found.append(machines.speed(snapshot, machine, METHODS[method](), 160, 0))
    assert found[1].tokens_per_second >= 1.5 * found[0].tokens_per_second


def test_a_table_of_an_earlier_process_is_used_from_the_first_round_on(
    snapshots, tmp_path, monkeypatch
):
    monkeypatch.setenv("SPECATTN_CACHE", str(tmp_path))
    snapshot, machine = snapshots("code"), Machine("0.6b")
    machines.forget(snapshot)
    with machine.at_work():
        machines.warm(snapshot, METHODS["poss"](), 0)
        machines.forget(snapshot)  # as another process
        machine.captured.clear()
        found = machines.speed(snapshot, machine, METHODS["poss"](), 24, 0)
    history = found.requests[0].history
    assert history[0].drafted
    assert found.total.mean_acceptance_length > 1.8


def test_a_warm_up_times_all_that_may_be_drafted(snapshots):
    snapshot, machine = snapshots("code"), Machine("0.6b")
    machines.forget(snapshot)
    with machine.at_work():
        machines.warm(snapshot, METHODS["eagle3"](), 0)
        found = machines.speed(snapshot, machine, METHODS["eagle3"](), 8, 0)
    details = found.details
    assert {*details["ms of a eagle3, width x depth"]} >= {"1 x 1", "4 x 3", "10 x 6"}
    assert {"1", "4", "9", "17", "33", "60"} <= {*details["ms of a pass"]}


def test_one_slow_pass_ends_no_drafting(snapshots):
    """A first pass of four rows that takes ten times as long as the others."""
    snapshot, found = snapshots("code"), []
    for slow in (False, True):
        machine = Machine("toy")
        machines.forget(snapshot)
        real, met = Machine.run_pass, []

        def run(own, rows, capture, real=real, met=met, slow=slow):
            met.append(rows)
            real(own, rows, capture)
            own.spend(15.0 * (slow and rows > 1 and sum(n > 1 for n in met) == 1))

        with machine.at_work(), patch.object(Machine, "run_pass", run):
            found.append(machines.speed(snapshot, machine, METHODS["suffix"](), 64, 0))
    quick, slow = (one.total.mean_acceptance_length for one in found)
    assert slow == pytest.approx(quick, rel=0.2)


@pytest.mark.parametrize("requests", [1, 2, 8, 32])
@pytest.mark.parametrize("tokens", [1.2, 2.0, 5.0])
def test_a_batch_ends_with_its_last_request(requests, tokens):
    """Chains without end whose tokens come true alike: 200 runs of 256 tokens a request."""
    left, random = 256, np.random.default_rng(0)
    written = random.geometric(1 / tokens, (200, requests, left)).cumsum(2)
    rounds = 1 + (written < left).sum(2).max(1)
    worth = Pacer.together(SimpleNamespace(requests=requests, left=left), tokens)
    assert left / worth == pytest.approx(rounds.mean(), rel=0.05)


def test_why_is_said_in_plain_words(snapshots):
    snapshot, machine = snapshots("code"), Machine("h100")
    machines.forget(snapshot)
    with machine.at_work():
        machines.warm(snapshot, METHODS["poss"](), 0)
        found = machines.speed(snapshot, machine, METHODS["poss"](), 24, 0)
    said = found.details["last choice"]
    assert said.startswith("poss, ")
    assert "tokens expected in" in said
    assert said.endswith("; plain decoding 1 in 9.9 ms")


def test_what_is_looked_up_grows_with_what_rounds_have_shown(monkeypatch):
    """To 17 rows at first, then to four times the most of any so far."""
    model, text = tiny_model("qwen3", vocab_size=24), torch.arange(8).repeat(20)[None]
    monkeypatch.setitem(
        machines.MACHINES, "flat", machines.MACHINES["toy"] | {"passes": {1: 1.5, 65: 1.6}}
    )
    with Machine("flat").at_work():
        found = generate(model, text, "suffix", max_new_tokens=240, temperature=0)
    rows = [1 + round.drafted for round in found.statistics.requests[0].history]
    most = [1, *accumulate(rows, max)]
    assert all(now <= max(17, 4 * before) for now, before in zip(rows, most, strict=False))
    assert max(rows) > 17


@pytest.mark.parametrize("turn", range(4))
def test_what_seems_to_lose_is_drafted_again_now_and_then(snapshots, turn):
    """When that costs a small share of the time since, whatever turn comes first."""
    snapshot, machine = snapshots("code"), Machine("toy")
    machines.forget(snapshot)
    with machine.at_work():
        machines.warm(snapshot, METHODS["poss"](), 0)
        real, begin = Pacer._offers, Pacer.__init__

        def later(self, *args, **options):
            begin(self, *args, **options)
            self._turn = turn

        def worthless(self, share, depth):
            offers = real(self, share, depth)
            return [one._replace(tokens=0.7 * one.seconds / 1.55e-3) for one in offers]

        with patch.object(Pacer, "_offers", worthless), patch.object(Pacer, "__init__", later):
            found = machines.speed(snapshot, machine, METHODS["poss"](), 150, 0)
    drafted = [round.drafted > 0 for round in found.requests[0].history]
    assert 0 < sum(drafted) < 0.2 * len(drafted)


def test_what_is_tried_at_little_cost_keeps_no_effort_of_twice_that_from_its_turn():
    """Of the drafter that is best: 3 tokens in 10 ms; others lose 0.3 and 0.6 ms a round."""
    best = Choice("x", Effort(4, 3), 13, 3.0, 0.010, 3.0)
    others = [
        best._replace(effort=effort, seconds=best.seconds + loss)
        for effort, loss in ((Effort(16, 3), 0.0003), (Effort(4, 5), 0.0006))
    ]
    ledger = Ledger(capture=0.0)
    pacer = SimpleNamespace(
        ledger=ledger, shares=[None], _offers=lambda *given: [best, *others],
        _new=lambda *given: 0.0, _records=lambda *given: False,
    )  # fmt: skip
    share, found = SimpleNamespace(name="x", title="x"), []
    for one in others:
        ledger.tried["x", one.effort] = 0.0
    for _ in range(200):
        ledger.elapsed += 0.010
        found.append(Pacer._due(pacer, share, 6, best, 300.0))
    lost = sum(one.seconds - best.seconds for one in found if one)
    assert found.count(others[0]) >= 5
    assert found.count(others[1]) >= 3
    assert lost <= 0.011 * ledger.elapsed


def test_threads_and_runs_keep_to_their_own(snapshots):
    """Two runs of a model at once, each with a pacer: texts are plain decoding's."""
    model = tiny_model("qwen3", vocab_size=24)
    given = prompts([30, 12], vocabulary=24)
    wanted = generate(model, given, "plain", max_new_tokens=40, temperature=0).new_tokens
    for method in ("suffix", "vegas", "cast", "prompt_lookup", "token_recycling"):
        found = generate(model, given, method, max_new_tokens=40, temperature=0)
        assert found.new_tokens == wanted

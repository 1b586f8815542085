"""`Auto` as vLLM calls it, on a machine whose steps take what a test says."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="run by `make test-vllm`")

from specattn.integrations.vllm import Auto, auto

CAPACITY = 4096
PASSAGE = list(range(100, 160))
REPEATING = PASSAGE * 60
FRESH = (np.random.default_rng(0).permutation(3000) + 1000).tolist()


class Server:
    """Steps of a target that writes given texts; a step of n rows takes ``seconds(n)``."""

    def __init__(self, monkeypatch, seconds, kind=Auto, most=15):
        self.seconds, self.now = seconds, 0.0
        clock = SimpleNamespace(
            now=lambda: self.now, passed=lambda one: True, seconds=lambda begin, end: end - begin
        )
        monkeypatch.setattr(auto, "Clock", lambda device: clock)
        self.drafter = kind(
            SimpleNamespace(
                speculative_config=SimpleNamespace(num_speculative_tokens=most),
                model_config=SimpleNamespace(
                    max_model_len=CAPACITY, get_vocab_size=lambda: 8192, tokenizer="no-folder"
                ),
                device_config=SimpleNamespace(device=torch.device("cpu")),
                parallel_config=SimpleNamespace(world_size=1),
            )
        )
        self.texts: list[list[int]] = []  # what each request will have been given
        self.lengths: list[int] = []
        self.drafts: list[list[int]] = []
        self.plain = 0.0  # what its tokens would have taken without drafts

    def add(self, text, prompt):
        """Add a request whose prompt is the text's beginning."""
        self.texts.append(text)
        self.lengths.append(prompt)
        self.drafts.append([])

    def step(self, reading=0):
        """Verify all drafts beside a prompt's part of some rows; return what was drafted next."""
        self.now += self.seconds(sum(1 + len(draft) for draft in self.drafts) + reading)
        sampled = []
        for row, (text, draft) in enumerate(zip(self.texts, self.drafts, strict=True)):
            begin = self.lengths[row]
            right = next(
                (n for n, token in enumerate(draft) if token != text[begin + n]), len(draft)
            )
            sampled.append(text[begin : begin + right + 1])
            self.lengths[row] += right + 1
        tokens = np.zeros((len(self.texts) + 1, CAPACITY), dtype=np.int32)
        for row, (text, length) in enumerate(zip(self.texts, self.lengths, strict=True)):
            tokens[row, :length] = text[:length]
        part = [[]] if reading else []
        lengths = np.array([*self.lengths, 0])
        self.drafts = self.drafter.propose([*sampled, *part], lengths, tokens)[: len(self.texts)]
        self.plain += max(map(len, sampled)) * self.seconds(len(self.texts))
        return self.drafts


def free(rows):
    """Return what a step takes where rows cost next to nothing."""
    return 1.0 + 0.001 * rows


def dear(rows):
    """Return what a step takes where a row costs more than the one before."""
    return rows**1.2


def test_a_text_that_repeats_itself_is_drafted_at_full_length_where_rows_are_free(monkeypatch):
    server = Server(monkeypatch, free)
    server.add(REPEATING, 200)
    drafted = [len(server.step()[0]) for _ in range(30)]
    assert drafted[0] == 0, "before any step was timed"
    assert min(drafted[-5:]) == 15
    assert server.now < server.plain / 4


@pytest.mark.parametrize("requests", [1, 16])
def test_nothing_is_drafted_where_rows_are_dear(monkeypatch, requests):
    server = Server(monkeypatch, dear)
    for number in range(requests):
        server.add(REPEATING, 200 + number)
    drafted = [any(server.step()) for _ in range(300)]
    assert sum(drafted[100:]) < 0.2 * 200, "trials apart"
    assert server.now < 1.02 * 300 * dear(requests)


def test_of_many_requests_those_draft_whose_texts_repeat_themselves(monkeypatch):
    server = Server(monkeypatch, lambda rows: 1.0 + 0.02 * rows)
    for number in range(7):
        server.add(FRESH[number * 100 :], 100)
    server.add(REPEATING, 200)
    for _ in range(30):
        drafts = server.step()
    assert len(drafts[-1]) > 8
    assert sum(map(len, drafts[:-1])) == 0


def test_a_text_that_offers_nothing_is_looked_up_seldom_until_it_repeats_itself(monkeypatch):
    server = Server(monkeypatch, free)
    server.add([*FRESH[:600], *PASSAGE * 4], 100)
    asked = []
    looked = server.drafter.requests.of_rows
    monkeypatch.setattr(
        server.drafter.requests,
        "of_rows",
        lambda *given: asked.append(server.lengths[0]) or looked(*given),
    )
    steps = 0
    while server.lengths[0] < 580:
        server.step()
        steps += 1
    assert len(asked) < 0.3 * steps
    while server.lengths[0] < 600 + 4 * len(PASSAGE) - 20:
        server.step()
        steps += 1
    assert steps < 500 + 20 + 1.5 * len(PASSAGE) + 3 * len(PASSAGE) / 6


def test_a_draft_has_any_length(monkeypatch):
    """What follows the passage differs each time: only the passage itself is drafted."""
    text = [token for turn in range(40) for token in (*PASSAGE[:6], FRESH[turn], FRESH[turn + 50])]
    server = Server(monkeypatch, lambda rows: 1.0 + 0.05 * rows)
    server.add(text, 80)
    drafted = {len(server.step()[0]) for _ in range(60)}
    assert {0, 4} <= drafted or {0, 5} <= drafted
    assert max(drafted) < 15


def test_a_plain_step_is_tried_again_where_drafts_win(monkeypatch):
    """What it took may have been chance, and would never be met again."""
    server = Server(monkeypatch, free)
    server.add(REPEATING, 200)
    drafted = [len(server.step()[0]) for _ in range(200)]
    assert 1 <= drafted[20:].count(0) <= 4


def test_the_first_steps_behind_a_prompt_are_not_timed(monkeypatch):
    server = Server(monkeypatch, lambda rows: 5.0 if server.lengths[0] < 203 else 1.0)
    server.add(FRESH, 200)
    for _ in range(8):
        server.step()
    assert server.drafter.lookup.measured()[0][16] == 1.0


def test_steps_beside_prompts_are_not_timed(monkeypatch):
    server = Server(monkeypatch, free)
    server.add(REPEATING, 200)
    for _ in range(2 + auto._COLD):
        server.step()
    known = server.drafter.lookup.measured()[0][16]
    for _ in range(4):
        server.now += 1000.0  # the server was idle, or others were read beside
        server.step(reading=500)
    assert server.drafter.lookup.measured()[0][16] == known


def test_another_batch_is_not_timed_as_the_one_before(monkeypatch):
    server = Server(monkeypatch, free)
    server.add(REPEATING, 200)
    for _ in range(5):
        server.step()
    before = dict(server.drafter.lookup.costs().passes.medians)
    server.add(FRESH, 100)
    server.now += 1000.0  # its prompt was read
    server.step()
    assert all(one < 1000 for one in server.drafter.lookup.costs().passes.medians.values())
    assert before


def test_a_request_that_begins_as_one_ended_is_not_timed_as_that(monkeypatch):
    """The same prompt, read again behind one token."""
    server = Server(monkeypatch, free)
    server.add(REPEATING, 200)
    for _ in range(5):
        server.step()
    server.lengths, server.drafts = [server.lengths[0] - 1], [[]]
    server.now += 1000.0  # its prompt was read
    server.step()
    assert all(one < 1000 for one in server.drafter.lookup.costs().passes.medians.values())


def test_what_was_slow_once_is_tried_again(monkeypatch):
    """The first two steps with drafts find all cold; later ones are as fast as any."""
    seconds = iter([6.0] * 2)
    server = Server(
        monkeypatch, lambda rows: free(rows) if rows == 1 else next(seconds, free(rows))
    )
    server.add(REPEATING, 200)
    drafted = [len(server.step()[0]) for _ in range(450)]
    assert 0 in drafted[100:]
    assert min(drafted[-5:]) == 15


def test_promises_that_do_not_come_true_are_believed_less(monkeypatch):
    wrong = auto.Chain([5] * 8, [0.9**n for n in range(1, 9)])
    monkeypatch.setattr("specattn.integrations.vllm.texts.Text.chain", lambda *given: wrong)
    server = Server(monkeypatch, lambda rows: 1.0 + 0.05 * rows)
    server.add(FRESH, 100)
    drafted = [len(server.step()[0]) for _ in range(200)]
    assert max(drafted[:10]) > 2
    assert sum(drafted[100:]) < 0.2 * 100, "trials apart"


@pytest.mark.parametrize("remember", [False, True])
def test_what_others_say_shows_in_no_draft_unless_that_is_wanted(monkeypatch, remember):
    """A second request asks for what a first one was given: its beginning alone."""
    kind = type("Remembering", (Auto,), {"remember": remember})
    server = Server(monkeypatch, free, kind)
    server.add([*FRESH[:20], *PASSAGE, *FRESH[200:]], 10)
    for _ in range(60):
        server.step()
    server.texts, server.lengths, server.drafts = [], [], []
    server.add([*FRESH[900:920], *PASSAGE, *FRESH[1000:]], 24)
    drafted = [token for _ in range(30) for token in server.step()[0]]
    assert bool(set(drafted) & set(PASSAGE)) == remember


def test_a_request_is_drafted_nothing_but_its_own_tokens(monkeypatch):
    server = Server(monkeypatch, free)
    server.add([*PASSAGE * 9, *FRESH[:400]], 90)
    server.add([*PASSAGE[:30], *FRESH[400:600] * 9], 60)
    for _ in range(60):
        for text, length, draft in zip(server.texts, server.lengths, server.step(), strict=True):
            assert set(draft) <= set(text[: length + 16])


def test_no_draft_reaches_behind_the_longest_text(monkeypatch):
    server = Server(monkeypatch, free)
    server.add([7, 8] * CAPACITY, CAPACITY - 60)
    while server.lengths[0] < CAPACITY - 1:
        (draft,) = server.step()
        assert not draft or server.lengths[0] + len(draft) < CAPACITY

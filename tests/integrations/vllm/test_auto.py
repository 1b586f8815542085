"""`Auto` as vLLM calls it, on a machine whose steps take what a test says."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="run by `make test-vllm`")

from specattn.integrations.vllm import Auto, Vegas, auto, texts

CAPACITY = 8192
PASSAGE = list(range(100, 160))
REPEATING = PASSAGE * 120
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

    @property
    def known(self):
        """What the drafter knows of plain steps."""
        return self.drafter.steps.plain

    def lets_the_target_draft(self, seconds, chance, share=0.4):
        """Let a token of the target's drafts take so long, and come true so often.

        At first it is taken to take that share of a step.
        """
        self.drafter.own = Target(self, seconds, chance, share)

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


class Target:
    """Drafts of a target of which each token comes true with the same chance."""

    ranks, collects = 1, False

    def __init__(self, server, seconds, chance, share):
        self.server, self.each, self.chance, self.expected = server, seconds, chance, share
        self.random = np.random.default_rng(0)
        self.asked = []  # rows and depth, by step

    def collect(self, wanted):
        self.collects = wanted

    def share(self, lengths):
        return self.expected

    def drafted(self, rows, lengths, tokens, steps, again):
        """Draft for the rows if the last pass has collected."""
        ready = rows if self.collects else []
        self.collects = again or (bool(rows) and not ready)
        self.asked.append((list(ready), steps))
        chains = {}
        if ready:
            self.server.now += steps * self.each
        for row in ready:
            begin = self.server.lengths[row]
            chain = np.array(self.server.texts[row][begin : begin + steps])
            chains[row] = np.where(self.random.random(steps) < self.chance, chain, 8000).tolist()
        return chains


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


def linear(rows):
    """Return what a step takes where each row costs a twentieth of the first."""
    return 0.95 + 0.05 * rows


def stepped(rows):
    """Return what a step takes where more than eight rows cost twice as much."""
    return 1.0 + 0.1 * (rows > 4) + 1.0 * (rows > 8)


def speed_of(server, steps=300):
    """Return new tokens per second."""
    before = sum(server.lengths)
    for _ in range(steps):
        server.step()
    return (sum(server.lengths) - before) / server.now


@pytest.mark.parametrize("seconds", [free, linear, dear])
@pytest.mark.parametrize("requests", [1, 8])
def test_a_repeating_text_is_as_fast_as_with_the_best_fixed_length(monkeypatch, requests, seconds):
    server = Server(monkeypatch, seconds)
    for number in range(requests):
        server.add(REPEATING, 200 + number)
    best = max(requests * rows / seconds(requests * rows) for rows in range(1, 17))
    assert speed_of(server) > 0.95 * best


@pytest.mark.parametrize("seconds", [free, linear, stepped, dear])
@pytest.mark.parametrize("requests", [1, 8])
def test_drafts_that_never_come_true_cost_next_to_nothing(monkeypatch, requests, seconds):
    wrong = texts.Chain([5] * 8, [0.9**n for n in range(1, 9)])
    monkeypatch.setattr(texts, "likeliest_path", lambda *given: wrong)
    server = Server(monkeypatch, seconds)
    for number in range(requests):
        server.add(REPEATING, 200 + number)
    assert speed_of(server) > 0.97 * requests / seconds(requests)


def test_a_cliff_in_what_rows_cost_is_looked_behind(monkeypatch):
    """By a line through 7 and 13 rows 16 would not pay."""
    server = Server(monkeypatch, stepped)
    server.add(REPEATING, 200)
    drafted = [len(server.step()[0]) for _ in range(300)]
    assert drafted[-1] == 15


@pytest.mark.parametrize("requests", [1, 8])
def test_the_target_drafts_where_that_is_fastest(monkeypatch, requests):
    """A fresh text offers nothing; of a chain's tokens nine of ten come true."""
    server = Server(monkeypatch, linear)
    server.lets_the_target_draft(0.1 * linear(requests), 0.9)
    for number in range(requests):
        server.add(FRESH, 200 + number)
    plain = requests / linear(requests)

    def fixed(depth):
        tokens = sum(0.9**n for n in range(depth + 1))
        return requests * tokens / (linear(requests * (1 + depth)) + 0.1 * depth * linear(requests))

    best = max(map(fixed, range(7)))
    assert best > 1.5 * plain
    assert speed_of(server) > 0.93 * best


def test_a_target_whose_drafts_lose_is_asked_seldom(monkeypatch):
    server = Server(monkeypatch, linear)
    server.lets_the_target_draft(0.9, 0.3)
    server.add(FRESH, 200)
    assert speed_of(server) > 0.97 / linear(1)
    asked = server.drafter.own.asked
    assert 1 <= sum(bool(rows) for rows, _ in asked) <= 12, "it was tried"


@pytest.mark.parametrize(("chance", "switch"), [(0.95, True), (0.1, True), (0.1, False)])
def test_vegas_drafts_one_length_or_nothing_or_always(monkeypatch, chance, switch):
    server = Server(monkeypatch, linear, type("Mine", (Vegas,), {"switch": switch}), most=6)
    server.lets_the_target_draft(0.1, chance)
    server.add(REPEATING, 200)
    drafted = [len(server.step()[0]) for _ in range(300)]
    assert set(drafted) == {0, 6}
    often = drafted[50:].count(6)
    if not switch:
        assert often == 250
    else:
        assert often > 240 if chance > 0.5 else 1 <= often < 10


def test_each_request_drafts_by_what_promises_it_more(monkeypatch):
    server = Server(monkeypatch, free)
    server.lets_the_target_draft(0.01, 0.8, share=0.02)
    server.add(REPEATING, 200)
    server.add(FRESH, 200)
    for _ in range(80):
        server.step()
    sources = [server.drafter.own.asked[-1][0], *map(len, server.drafts)]
    assert sources == [[1], 15, 6]


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
    server.add([*FRESH[:1200], *PASSAGE * 4], 100)
    asked, looked = [], texts.Text.chain

    def chain(*given):
        asked.append(server.now)
        server.now += 0.1
        return looked(*given)

    monkeypatch.setattr(texts.Text, "chain", chain)
    steps = 0
    while server.lengths[0] < 1180:
        server.step()
        steps += 1
    assert len(asked) < 0.25 * steps
    assert 0.1 * sum(one > 500 for one in asked) < 0.02 * (server.now - 500), "and ever more seldom"
    while server.lengths[0] < 1200 + 4 * len(PASSAGE) - 20:
        server.step()
        steps += 1
    assert steps < 1100 + 20 + 1.5 * len(PASSAGE) + 3 * len(PASSAGE) / 6


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
    assert server.known == 1.0


def test_steps_beside_prompts_are_not_timed(monkeypatch):
    server = Server(monkeypatch, free)
    server.add(REPEATING, 200)
    for _ in range(2 + auto._COLD):
        server.step()
    known = server.known
    for _ in range(4):
        server.now += 1000.0  # the server was idle, or others were read beside
        server.step(reading=500)
    assert server.known == known == free(1)


def test_another_batch_is_not_timed_as_the_one_before(monkeypatch):
    server = Server(monkeypatch, free)
    server.add(REPEATING, 200)
    for _ in range(5):
        server.step()
    before = dict(server.drafter.steps.costs.seconds)
    server.add(FRESH, 100)
    server.now += 1000.0  # its prompt was read
    one = server.drafter.steps.costs
    server.step()
    assert before
    for costs in (one, server.drafter.steps.costs):
        assert all(seconds < 1000 for seconds in costs.seconds.values())


def test_a_request_that_begins_as_one_ended_is_not_timed_as_that(monkeypatch):
    """The same prompt, read again behind one token."""
    server = Server(monkeypatch, free)
    server.add(REPEATING, 200)
    for _ in range(5):
        server.step()
    server.lengths, server.drafts = [server.lengths[0] - 1], [[]]
    server.now += 1000.0  # its prompt was read
    server.step()
    assert 0 < max(server.drafter.steps.costs.seconds.values()) < 1000


def test_what_was_slow_once_is_tried_again(monkeypatch):
    """The first two steps with drafts find all cold; later ones are as fast as any."""
    seconds = iter([6.0] * 2)
    server = Server(
        monkeypatch, lambda rows: free(rows) if rows == 1 else next(seconds, free(rows))
    )
    server.add(REPEATING, 200)
    drafted = [len(server.step()[0]) for _ in range(60)]
    assert min(drafted[-5:]) == 15


def test_a_long_text_behind_a_short_one_is_taken_for_no_such(monkeypatch):
    """Steps of the short one, a fourth as long, say nothing of what the long one's drafts take."""
    level = lambda: 1 if server.lengths[0] > 1000 else 0.25  # noqa: E731
    server = Server(monkeypatch, lambda rows: level() * free(rows))
    server.add(REPEATING, 10)
    for _ in range(4):
        server.step()
    server.texts, server.lengths, server.drafts = [], [], []
    server.add(REPEATING, 5000)
    drafted = [len(server.step()[0]) for _ in range(30)]
    assert min(drafted[-5:]) == 15


def test_where_nothing_is_drafted_plain_steps_are_timed_anew(monkeypatch):
    """Else what they took once would be compared for ever."""
    server = Server(monkeypatch, lambda rows: free(rows) * (1 if server.lengths[0] < 300 else 4))
    server.add(FRESH, 200)
    looked = texts.Text.chain

    def chain(*given):
        server.now += 0.1
        return looked(*given)

    monkeypatch.setattr(texts.Text, "chain", chain)
    for _ in range(500):
        server.step()
    assert server.known == pytest.approx(4 * free(1), rel=0.2)


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

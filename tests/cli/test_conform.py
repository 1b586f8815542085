"""`specattn conform`: what it says of engines that keep their promise, and of those that do not.

The engines are servers in this process, whose model is arithmetic: logits are drawn from a hash of
the text. One rounds, one takes drafts unseen, one keeps what a rejected draft left in its cache.
"""

import json
import math
import random
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specattn.conform import Answer, Place, Verdict, judge, noise_of, parting
from specattn.conform.endpoint import LISTED

WORDS = [f" w{n}" for n in range(40)]


class Model:
    """Logits of the next word by the words before: a hash, and noise of an engine's own."""

    def __init__(self, rounding=0.0, seed=0):
        self.rounding, self.seed = rounding, seed

    def logits(self, words):
        drawn = random.Random(" ".join(words[-3:]))
        exact = [drawn.gauss(0, 3) for _ in WORDS]
        if drawn.random() < 0.02:  # two words as likely as each other
            exact[1] = exact[0] = max(exact) + 1
        own = random.Random(f"{self.seed} {words}")
        return [x + own.uniform(-1, 1) * self.rounding for x in exact]

    def next(self, words, count):
        """Return each new word with its logits."""
        words = list(words)
        for _ in range(count):
            logits = self.logits(words)
            word = WORDS[max(range(len(WORDS)), key=logits.__getitem__)]
            yield word, logits
            words.append(word)


class Gullible(Model):
    """Takes one drafted word in twenty unseen: the second likeliest."""

    def next(self, words, count):
        words, drawn = list(words), random.Random(self.seed)
        for _ in range(count):
            logits = self.logits(words)
            order = sorted(range(len(WORDS)), key=logits.__getitem__)
            word = WORDS[order[-2] if drawn.random() < 0.05 else order[-1]]
            yield word, logits
            words.append(word)


class Stale(Model):
    """Leaves a rejected draft in its cache: from some word on its logits are another text's."""

    def logits(self, words):
        right = super().logits(words)
        if len(words) < 30:
            return right
        wrong = super().logits(["left over", *words[-2:]])
        return [0.8 * a + 0.2 * b for a, b in zip(right, wrong, strict=True)]


def completion(model, body, lists=True):
    """Return what a server says."""
    found = list(model.next(body["prompt"].split(), body["max_tokens"]))
    columns = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    for word, logits in found:
        most = max(logits)
        whole = most + math.log(sum(math.exp(x - most) for x in logits))
        likely = {name: x - whole for name, x in zip(WORDS, logits, strict=True)}
        best = sorted(likely, key=likely.__getitem__)[-body.get("logprobs", LISTED) :]
        columns["tokens"].append(word)
        columns["token_logprobs"].append(likely[word])
        columns["top_logprobs"].append({name: likely[name] for name in best})
    choice = {"text": "".join(word for word, _ in found)}
    if lists and "logprobs" in body:
        choice["logprobs"] = columns
    return {"choices": [choice]}


@contextmanager
def serving(reply):
    """Serve `reply(body)`, which returns a status and what is sent; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send(200, {"data": [{"id": "hash"}]})

        def do_POST(self):
            size = int(self.headers["Content-Length"])
            self._send(*reply(json.loads(self.rfile.read(size))))

        def _send(self, status, content):
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def engine(model, **options):
    return serving(lambda body: (200, completion(model, body, **options)))


@pytest.fixture
def held(specattn, tmp_path):
    """Hold an engine against another; return exit code, report and what was said."""

    def run(first, second, *arguments):
        out = tmp_path / "report.json"
        with first as plain, second as drafting:
            code, text, said = specattn(
                "conform", plain, f"{drafting}/v1", *arguments, "--json", out
            )
        return code, json.loads(out.read_text()), text + said

    return run


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 10))]
)
def test_an_engine_that_only_rounds_is_acquitted_and_a_broken_one_convicted(held, seed):
    plain = partial(engine, Model(1e-3))
    code, report, _ = held(plain(), engine(Model(1e-3, seed + 1)), "--at-once", "4")
    assert code == 0
    assert report["counts"]["near-tie"] > 0
    assert report["counts"]["different"] == 0
    assert 1e-3 < report["noise"] < 8e-3
    code, report, said = held(plain(), engine(Gullible(1e-3, seed + 1)))
    assert code == 1
    assert report["counts"]["different"] >= 6
    assert "ranks the other token" in said
    code, report, said = held(plain(), engine(Stale(1e-3, seed + 1)))
    assert code == 1
    assert "another model, or another prompt" in said


def test_an_engine_is_itself(held):
    code, report, said = held(engine(Model()), engine(Model()))
    assert code == 0
    assert report["counts"] == {
        "same": 12,
        "near-tie": 0,
        "different": 0,
        "nothing compared": 0,
    }
    assert report["noise"] == 0
    assert "12 same, 0 near-tie, 0 different" in said


def test_a_narrow_terminal_gets_fewer_columns(specattn, columns):
    heads = {
        200: "prompt verdict parts at tokens why",
        80: "prompt verdict parts at tokens",
        40: "prompt verdict tokens",
    }
    with engine(Model(1e-3)) as plain, engine(Gullible(1e-3, 1)) as drafting:
        for width, head in heads.items():
            columns("stdout", width)
            code, text, _ = specattn("conform", plain, drafting)
            assert code == 1
            names, *rows = text.splitlines()
            assert " ".join(names.split()) == head
            assert len(rows) == 12


def test_without_log_probabilities_texts_are_compared_alone(held):
    code, report, said = held(engine(Model()), engine(Model(), lists=False))
    assert (code, report["counts"]["same"]) == (0, 12)
    assert "gives no log-probabilities" in said
    code, report, _ = held(engine(Model()), engine(Gullible(seed=1), lists=False))
    assert code == 1
    assert any("nothing explains it" in one["reason"] for one in report["prompts"])

    def refuses(body):
        if "logprobs" in body:
            return 400, {"error": {"message": "logprobs are not supported"}}
        return 200, completion(Model(), body)

    code, report, _ = held(engine(Model()), serving(refuses))
    assert (code, report["counts"]["same"]) == (0, 12)


TOKENS = list("abcdefgh")


def written(logprobs, listed, tokens=TOKENS):
    """Return what a server says that writes these tokens whatever it is asked."""
    columns = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": listed}
    return serving(
        lambda body: (200, {"choices": [{"text": "".join(tokens), "logprobs": columns}]})
    )


def likely():
    return written([-0.1] * 8, [{t: -0.1, "z": -3.0} for t in TOKENS])


def chat(logprob, top):
    content = [{"token": t, "logprob": logprob, "top_logprobs": top} for t in TOKENS]
    return serving(
        lambda body: (
            200,
            {"choices": [{"text": "".join(TOKENS), "logprobs": {"content": content}}]},
        )
    )


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(
            lambda: written([math.nan] * 8, [{t: math.nan, "z": -3.0} for t in TOKENS]), id="nan"
        ),
        pytest.param(
            lambda: written([-0.1] * 8, [{t: -0.1, "z": -math.inf} for t in TOKENS]), id="inf"
        ),
        pytest.param(lambda: written([0.0] * 8, [{t: 0.0} for t in TOKENS]), id="one token"),
        pytest.param(
            lambda: written([-0.1] * 8, [{t: -0.1, "y": -3.0} for t in TOKENS]), id="none common"
        ),
        pytest.param(
            lambda: written([None] * 8, [{t: -0.1, "z": -3.0} for t in TOKENS]), id="null number"
        ),
        pytest.param(
            lambda: chat(None, [{"token": "z", "logprob": -3.0}]), id="null number of a chat"
        ),
        pytest.param(
            lambda: chat(-0.1, [{"token": "z", "logprob": None}]), id="null in a chat's list"
        ),
    ],
)
def test_log_probabilities_that_cannot_be_compared_acquit_nobody(held, second):
    for engines in ((likely, second), (second, likely)):
        code, report, said = held(*(one() for one in engines))
        assert code == 1
        assert report["counts"]["nothing compared"] == 12
        assert report["places"] == 0
        assert "No logit of one engine could be held against the other's" in said
        assert "0 apart" not in said


@pytest.mark.parametrize("lists", [True, False])
def test_two_empty_answers_are_no_agreement(held, lists):
    empty = partial(written, [], [], []) if lists else partial(written, None, None, [])
    code, report, said = held(empty(), empty())
    assert code == 1
    assert report["counts"] == {
        "same": 0,
        "near-tie": 0,
        "different": 0,
        "nothing compared": 12,
    }
    assert "12 nothing compared" in said
    assert {one["reason"] for one in report["prompts"]} == {"both wrote nothing"}
    code, report, _ = held(likely(), empty())
    assert (code, report["counts"]["different"]) == (1, 12)


def test_null_lists_are_those_of_an_engine_without(held):
    for second in (written([-0.1] * 8, None), written(None, None), chat(-0.1, None)):
        code, report, said = held(likely(), second)
        assert (code, report["counts"]["same"], report["places"]) == (0, 12, 0)
        assert "gives no log-probabilities" in said


def test_places_are_counted_where_logits_were_compared(held):
    """A null at one place takes that place out, and no other."""
    numbers = [None, *[-0.1] * 7]
    code, report, said = held(likely(), written(numbers, [{t: -0.1, "z": -3.25} for t in TOKENS]))
    assert (code, report["counts"]["same"]) == (0, 12)
    assert report["places"] == 12 * 7
    assert report["noise"] == pytest.approx(0.25)
    assert "up to 0.25 apart (84 tokens)" in said


def test_texts_of_a_seed_part_without_excuse(held):
    """The servers here are greedy whatever they are asked: what counts is how parting is read."""
    code, report, _ = held(engine(Model(1e-3)), engine(Model(1e-3, 1)), "--temperature", "0.8")
    assert code == 1
    parted = [one for one in report["prompts"] if one["verdict"] == "different"]
    assert {one["reason"] for one in parted} == {"drawn with the same seed"}
    assert report["request"]["temperature"] == 0.8


def test_prompts_come_from_files_and_the_page_shows_where_texts_part(specattn, tmp_path):
    lines = tmp_path / "many.jsonl"
    lines.write_text('{"prompt": "one two"}\n\n{"prompt": "three <b> four"}\n')
    text = tmp_path / "one.txt"
    text.write_text("a b c")
    page = tmp_path / "report.html"
    with engine(Model()) as plain, engine(Gullible(seed=1)) as drafting:
        code, out, _ = specattn(
            *("conform", plain, drafting, "--prompt-file", lines, "--prompt-file", text),
            *("--html", page, "--max-new-tokens", "64", "--json", "-"),
        )
    report = json.loads(out)
    assert code == 1
    assert [one["name"] for one in report["prompts"]] == ["many.jsonl:1", "many.jsonl:2", "one.txt"]
    assert all(len(one["texts"][0].split()) == 64 for one in report["prompts"])
    shown = page.read_text()
    assert shown.count("<h2") == sum(one["place"] is not None for one in report["prompts"])
    assert '<span class="no">different</span>' in shown
    assert "$" not in shown


def test_a_checkpoint_is_held_against_a_server_of_itself(specattn, tmp_path):
    """The server decodes as the checkpoint does, or with a token of its own now and then."""
    from transformers import AutoTokenizer

    from specattn.conform import Request
    from specattn.conform.local import Local
    from tests.cli.conftest import TINY, tiny

    local = Local(tiny("auto"), AutoTokenizer.from_pretrained(TINY), "tiny")

    def reply(body, broken):
        found = local.answer(body["prompt"], Request(body["max_tokens"]))
        places = list(found.places)
        if broken:
            second = sorted(places[3].listed, key=places[3].listed.__getitem__)[-2]
            places[3] = Place(second, places[3].listed[second], places[3].listed)
        logprobs = {
            "content": [
                {
                    "token": one.token,
                    "logprob": one.logprob,
                    "top_logprobs": [{"token": t, "logprob": x} for t, x in one.listed.items()],
                }
                for one in places
            ]
        }
        text = "".join(one.token for one in places)
        return 200, {"choices": [{"text": text, "logprobs": logprobs}]}

    prompt = tmp_path / "prompt.py"
    prompt.write_text("def add(left, right):\n    return left + right\n\n\ndef sub(")
    arguments = ("--prompt-file", prompt, "--max-new-tokens", "8")
    for broken in (False, True):
        with serving(partial(reply, broken=broken)) as url:
            code, text, said = specattn("conform", "tiny", url, *arguments)
        assert code == broken, text + said
        assert ("ranks the other token" in text) == broken


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        ((500, {"error": "out of memory"}), "status 500"),
        ((200, b"<html>"), "expected JSON"),
        ((200, {"choices": []}), "expected a completion: IndexError"),
        (
            (200, {"choices": [{"text": "x", "logprobs": {"tokens": ["x"]}}]}),
            "expected token_logprobs of 1 tokens, got 0",
        ),
    ],
)
def test_a_server_that_answers_something_else_is_named(refused, reply, named):
    with engine(Model()) as plain, serving(lambda body: reply) as url:
        refused(named, "conform", plain, url)


def test_bad_arguments_are_named(refused, tmp_path):
    with engine(Model()) as url:
        refused("DRAFTING: expected a URL, got 'tiny'", "conform", url, "tiny")
        refused("PLAIN: nowhere is not a folder", "conform", "nowhere", url)
        refused("Connection refused", "conform", url, "http://127.0.0.1:9")
        refused("seeds differ", "conform", "tiny", url, "--temperature", "1")
        refused("expected a file, got -", "conform", url, url, "--html", "-")
        empty = tmp_path / "empty.txt"
        empty.write_text("")
        refused("expected text", "conform", url, url, "--prompt-file", empty)
        wrong = tmp_path / "wrong.jsonl"
        wrong.write_text('{"text": "no prompt"}\n')
        refused("'prompt'", "conform", url, url, "--prompt-file", wrong)


def test_gaps_and_noise_are_those_of_logits():
    first = Answer("ab", (Place("a", -0.1, {"a": -0.1, "b": -3.0}), Place("b", -0.6, {"a": -0.8})))
    second = Answer("aa", (Place("a", -0.2, {"a": -0.2, "b": -3.0}), Place("a", -0.7, {"b": -0.8})))
    assert parting(first, second) == 1
    assert noise_of([(first, second)]) == pytest.approx(0.1)
    found = judge(first, second, 0.2)
    assert found.gaps == pytest.approx((0.2, 0.1))
    assert found.verdict == Verdict.NEAR_TIE
    assert judge(first, second, 0.1).verdict == Verdict.DIFFERENT
    assert judge(first, first, 0.0).verdict == Verdict.SAME
    unknown = Answer("aa", (second.places[0], Place("a", math.nan, {"b": -0.8})))
    assert judge(first, unknown, 1.0).reason == (
        "the second engine gives no finite log-probabilities: nothing explains it"
    )
    shorter = Answer("a", first.places[:1])
    assert judge(first, shorter, 1.0).reason == "one text has ended"

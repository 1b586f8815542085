"""Whoever drafts for `auto`, its texts are plain decoding's, by a clock that lies."""

import itertools
import logging
import math
import random
from itertools import product

import pytest
import torch

from specattn.decoding import METHODS, DFlash, Eagle3, LongSpec, Medusa, Mtp, PosS, Vegas, generate
from specattn.decoding.drafting.gains import NONE, Effort
from specattn.decoding.drafting.pacer import Choice, Pacer
from specattn.decoding.methods import auto as module
from specattn.decoding.methods.auto import Auto
from specattn.decoding.methods.suffix import SuffixDrafter
from specattn.decoding.model.quantised import is_rounded
from specattn.decoding.text.statistics import Clock
from tests import distributions
from tests.decoding.methods import test_dflash
from tests.decoding.models import prompts, tiny_model
from tests.decoding.mtp_folders import random_drafter as random_mtp
from tests.decoding.mtp_folders import with_head
from tests.decoding.pacing import with_costs, with_whims
from tests.drafters import eagle3_statement, poss_statement
from tests.drafters.eagle3_statement import random_drafter as random_eagle3
from tests.drafters.statement import random_drafter
from tests.drafters.test_heads import random_heads

V = 24


@pytest.fixture(autouse=True)
def _rounds_at_once(monkeypatch):
    """Short runs round weights too."""
    monkeypatch.setattr(module, "_PAYS", 0)


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", vocab_size=V, peak=0.7)


@pytest.fixture
def capricious(monkeypatch):
    """Let anybody draft trees of any size, at random; return the setter of its seed."""
    state = random.Random(0)
    with_whims(monkeypatch, state)
    return state.seed


def trained(model):
    return {
        "longspec": LongSpec(random_drafter(model, window=8, dtype=torch.float32), widths=(2, 3)),
        "poss": PosS(
            poss_statement.random_drafter(model, layers=2, dtype=torch.float32),
            width=3,
            depth=3,
            total_tokens=8,
        ),
        "eagle3": Eagle3(
            eagle3_statement.random_drafter(model, tokens=20, dtype=torch.float32),
            width=3,
            depth=3,
            total_tokens=8,
        ),
        "dflash": DFlash(test_dflash.random_drafter(model), width=3, total_tokens=8),
        "medusa": Medusa(random_heads("medusa", model, dtype=torch.float32), widths=(2, 2)),
    }


@pytest.mark.parametrize("name", ["longspec", "poss", "eagle3", "dflash", "medusa"])
@pytest.mark.parametrize(
    ("temperature", "lengths"),
    [
        (0.0, (5, 33, 60)),
        (1.2, (40,)),
        pytest.param(0.0, (40,), marks=pytest.mark.slow),
        pytest.param(1.2, (5, 33, 60), marks=pytest.mark.slow),
    ],
)
def test_the_text_is_that_of_plain_decoding_whoever_drafts(
    model, capricious, name, temperature, lengths
):
    method = Auto(trained=trained(model)[name])
    texts = prompts(lengths, vocabulary=V)
    settings = {"max_new_tokens": 60, "temperature": temperature, "top_k": 0, "seed": 3}
    wanted = generate(model, texts, "plain", **settings).new_tokens
    met = set()
    for seed in range(4):
        capricious(seed)
        found = generate(model, texts, method, **settings)
        assert found.new_tokens == wanted
        met |= set(found.statistics.details["rounds"])
    assert met == {"none", "suffix", "vegas", "cast", name}


def test_requests_of_a_batch_are_drafted_for_by_different_drafters(model, capricious, monkeypatch):
    """In one round: what was looked up promises more to some of them."""
    rounds, propose = [], module._AutoDrafter.propose

    def noted(self, root):
        draft = propose(self, root)
        rounds.append((self.name, tuple(self.own)))
        names = [self.name if own and self.name else "suffix" for own in self.own]
        expected.append(dict(zip(self.sequences.active, names, strict=True)))
        return draft

    expected = []
    monkeypatch.setattr(module._AutoDrafter, "propose", noted)
    method = Auto(trained=trained(model)["longspec"])
    texts = prompts((40, 20, 60), vocabulary=V)
    settings = {"max_new_tokens": 80, "temperature": 0}
    wanted = generate(model, texts, "plain", **settings).new_tokens
    mixed, apart = set(), False
    for seed in range(6):
        capricious(seed)
        rounds.clear(), expected.clear()
        found = generate(model, texts, method, **settings)
        assert found.new_tokens == wanted
        mixed |= {name for name, own in rounds if len(set(own)) == 2}
        histories = [request.history for request in found.statistics.requests]
        apart |= len({len(history) for history in histories}) > 1
        for number, names in enumerate(expected):
            for request, name in names.items():
                one = histories[request][number]
                assert one.drafter == (name if one.drafted else None)
            assert sum(len(history) > number for history in histories) == len(names)
    assert apart, "requests must end in different rounds of one run at least"
    assert mixed == {"vegas", "cast", "longspec"}


@pytest.mark.parametrize("pays", [False, True])
def test_a_text_that_offers_nothing_is_asked_less_often(model, monkeypatch, pays):
    """By a clock of a tick a moment, of which a lookup takes two; a pass of a row takes 2 s."""
    moments, tick = itertools.count(), 0.1 if pays else 1.0
    monkeypatch.setattr(Clock, "now", lambda _: next(moments))
    monkeypatch.setattr(Clock, "seconds", lambda _, begin, end: tick * (end - begin))
    with_costs(monkeypatch, lambda rows: 2.0 if pays else 2.0 * rows**2)
    asked, find = [], SuffixDrafter.find

    def noted(drafter):
        asked.append(drafter.sequences.ends[0])
        return find(drafter)

    monkeypatch.setattr(SuffixDrafter, "find", noted)
    text = torch.arange(8).repeat(20)[None]
    settings = {"max_new_tokens": 160, "temperature": 0}
    found = generate(model, text, Auto(vegas=False, cast=False, trained=None), **settings)
    assert found.new_tokens == generate(model, text, "plain", **settings).new_tokens
    if pays:
        assert found.statistics.passes - len(asked) <= 1
    else:
        assert len(asked) <= 0.3 * found.statistics.passes
        assert len(asked) > 1, "it is asked again"


@pytest.mark.parametrize(("faster", "weights"), [(("cpu",), "int4"), ((), None)])
def test_vegas_keeps_whole_weights_where_codes_are_not_faster(
    model, capricious, monkeypatch, faster, weights
):
    """Both are offered: few tokens with the model's own weights, and all tokens with codes."""
    monkeypatch.setattr(module, "_READ_FASTER", faster)
    begun, start = [], module.VegasDrafter.__init__

    def noted(self, method, *arguments):
        begun.append(method.weights)
        start(self, method, *arguments)

    monkeypatch.setattr(module.VegasDrafter, "__init__", noted)
    texts = prompts((40,), vocabulary=V)
    settings = {"max_new_tokens": 60, "temperature": 0}
    wanted = generate(model, texts, "plain", **settings).new_tokens
    met = set()
    for seed in range(4):
        capricious(seed)
        found = generate(model, texts, Auto(trained=None), **settings)
        assert found.new_tokens == wanted
        met |= set(found.statistics.details["rounds"])
    assert set(begun) == {weights}
    assert {"vegas", "cast"} <= met


def test_what_was_looked_up_is_left_where_nothing_is_chosen(model, monkeypatch):
    offered = []

    def choose(self, depth, rows=1, promised=()):
        offered.append(rows)
        return Choice(None, NONE, 1, 1.0, 1.0)

    with_costs(monkeypatch, lambda rows: 1.0)
    monkeypatch.setattr(Pacer, "choose", choose)
    text = torch.arange(8).repeat(20)[None]
    found = generate(model, text, Auto(trained=None), max_new_tokens=60, temperature=0)
    assert max(offered) > 1, "nothing was looked up"
    assert {round.drafter for round in found.statistics.requests[0].history} == {None}
    assert found.statistics.passes >= 59


def test_vegas_drafts_where_what_was_looked_up_is_left(model, monkeypatch):
    """A round that only captures what it selects by comes first."""
    with_costs(monkeypatch, lambda rows: 1.0)
    turns, waits = itertools.count(), 40

    def choose(self, depth, rows=1, promised=()):
        turn = next(turns)
        if turn < waits or depth < 1:
            return Choice(None, NONE, 1, 1.0, 1.0)
        vegas = next(share for share in self.shares if share.name.startswith("vegas"))
        return Choice("vegas", Effort(1, min(4, depth)), 1, 2.0, 1.0, math.inf) if vegas else None

    monkeypatch.setattr(Pacer, "choose", choose)
    text = torch.arange(8).repeat(20)[None]
    settings = {"max_new_tokens": 200, "temperature": 0}
    found = generate(model, text, Auto(trained=None), **settings)
    assert found.new_tokens == generate(model, text, "plain", **settings).new_tokens
    drafted = [round.drafter == "vegas" for round in found.statistics.requests[0].history]
    assert not any(drafted[: waits + 1])
    assert all(drafted[waits + 1 : -1])


def test_vegas_follows_a_tree_that_was_deeper_than_its_own(model, capricious):
    """Many tokens are newer than what it selected from."""
    text = torch.arange(8).repeat(20)[None]
    generated = generate(model, text, "plain", max_new_tokens=100, temperature=0).sequences[0]
    text = torch.cat([generated, generated[:-60]])[None]  # what comes has been there: deep matches
    settings = {"max_new_tokens": 60, "temperature": 0}
    wanted = generate(model, text, "plain", **settings).new_tokens
    deepest = 0
    for seed in range(6):
        capricious(seed)
        found = generate(model, text, Auto(trained=None), **settings)
        assert found.new_tokens == wanted
        deepest = max(deepest, len([n for n in found.statistics.total.accepted_at if n]))
    assert deepest > Vegas().max_gamma, "the case did not occur"


@pytest.mark.slow
def test_the_joint_distribution_of_four_tokens(monkeypatch, capricious):
    """By brute force, while anybody drafts and a clock says anything up to minutes."""
    vocabulary, depth, copies, batches = 6, 4, 3072, 16
    model = tiny_model("qwen3", vocab_size=vocabulary, peak=0.7)
    state = random.Random(5)
    monkeypatch.setattr(Clock, "seconds", lambda *_: 10 ** state.uniform(-6, 2))
    (prompt,) = prompts([14], vocabulary=vocabulary - 2)
    tables = []
    for length in range(depth):
        texts = [[*prompt.tolist(), *new] for new in product(range(vocabulary), repeat=length)]
        with torch.no_grad():
            tables.append(model(torch.tensor(texts)).logits[:, -1].double().softmax(-1))
    drafter = random_drafter(model, window=7, dtype=torch.float32)
    numbers, met = [], set()
    for batch in range(batches):
        found = generate(
            model,
            prompt.expand(copies, -1),
            Auto(trained=LongSpec(drafter, widths=(2, 3))),
            max_new_tokens=depth + 2,
            temperature=1.0,
            top_k=0,
            seed=batch,
        )
        new = torch.tensor(found.new_tokens)[:, :depth]
        numbers.append((new * vocabulary ** torch.arange(depth - 1, -1, -1)).sum(-1))
        met |= set(found.statistics.details["rounds"])
    assert met == {"none", "suffix", "vegas", "cast", "longspec"}
    expected = distributions.joint(tables)
    assert distributions.p_value(torch.cat(numbers), expected) > distributions.SIGNIFICANCE


def test_a_drafter_in_the_models_folder_is_found_and_loaded_once(tmp_path):
    model = tiny_model("qwen3", vocab_size=V)
    random_drafter(model, window=8, dtype=torch.float32).save_pretrained(tmp_path / "longspec")
    model.config._name_or_path = str(tmp_path)
    first, second = (Auto().prepared(model).trained for _ in range(2))
    assert isinstance(first, LongSpec)
    assert first is second
    assert Auto(trained=None).prepared(model).trained is None


def test_the_head_among_the_weights_in_the_models_folder_is_found(tmp_path):
    model, _ = with_head(tiny_model("qwen3", vocab_size=V), tmp_path, "Qwen3-Next, Qwen 3.5")
    found = Auto().prepared(model).trained
    assert isinstance(found, Mtp)
    text = prompts((9,), vocabulary=V)
    expected = generate(model, text, "plain", max_new_tokens=40, temperature=0).new_tokens
    output = generate(model, text, "auto", max_new_tokens=40, temperature=0)
    assert output.new_tokens == expected
    assert Auto(trained="mtp").prepared(model).trained.drafter is found.drafter


@pytest.mark.parametrize("kind", [LongSpec, Mtp])
def test_a_model_that_was_converted_gets_its_drafter_in_the_new_type(tmp_path, kind):
    """For ``model.float()`` makes no other model of it, and what is found is remembered with it."""
    model = tiny_model("qwen3", vocab_size=V)
    if kind is Mtp:
        model, _ = with_head(model, tmp_path, "Qwen3-Next, Qwen 3.5")
    else:
        random_drafter(model, window=8, dtype=torch.float32).save_pretrained(tmp_path / "longspec")
        model.config._name_or_path = str(tmp_path)
    text = prompts((9,), vocabulary=V)
    generate(model, text, "auto", max_new_tokens=8, temperature=0)
    model.double()
    assert isinstance(Auto().prepared(model).trained, kind)
    expected = generate(model, text, "plain", max_new_tokens=40, temperature=0).new_tokens
    assert generate(model, text, "auto", max_new_tokens=40, temperature=0).new_tokens == expected


@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("eagle3", lambda model, at: random_eagle3(model).save_pretrained(at)),
        ("dflash", lambda model, at: test_dflash.store(at, test_dflash.random_drafter(model))),
        ("mtp", lambda model, at: random_mtp(model).save_pretrained(at)),
    ],
)
def test_every_head_beside_a_model_is_considered(tmp_path, caplog, capricious, name, store):
    """Behind one that does not fit, too; and what it drafts does not show."""
    model, other = (tiny_model("qwen3", vocab_size=size) for size in (V, V + 8))
    model.config._name_or_path = str(tmp_path)
    poss_statement.random_drafter(other, layers=2).save_pretrained(tmp_path / "poss")
    store(model, tmp_path / name)
    with caplog.at_level(logging.WARNING):
        assert type(Auto().prepared(model).trained) is METHODS[name]
    assert f"{tmp_path}: the drafter of poss is not used" in caplog.text
    text = prompts((9,), vocabulary=V)
    expected = generate(model, text, "plain", max_new_tokens=40, temperature=0).new_tokens
    output = generate(model, text, "auto", max_new_tokens=40, temperature=0)
    assert output.new_tokens == expected
    assert output.statistics.details["rounds"][name] > 0


def test_a_drafter_that_does_not_fit_is_left_alone_and_named(tmp_path, caplog):
    model, other = (tiny_model("qwen3", vocab_size=size) for size in (V, V + 8))
    random_drafter(other, window=8, dtype=torch.float32).save_pretrained(tmp_path / "longspec")
    model.config._name_or_path = str(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert Auto().prepared(model).trained is None
    assert f"{tmp_path}: the drafter of longspec is not used" in caplog.text
    with pytest.raises(ValueError, match="vocab"):
        Auto(trained="longspec").prepared(model)


def test_a_method_without_a_trained_drafter_is_refused():
    known = "found, poss, eagle3, longspec, dflash, mtp, medusa or None"
    with pytest.raises(ValueError, match=f"{known}, got 'vegas'"):
        Auto(trained="vegas")


def test_weights_are_rounded_where_that_pays_and_memory_is_left(monkeypatch):
    """Not for a short run, nor where little memory is left; once they are there, always."""
    own, settings = tiny_model("qwen3", vocab_size=V), {"temperature": 0.0, "max_new_tokens": 10}
    text = [torch.arange(1, 9)]

    def rounded(limit, free):
        monkeypatch.setattr(module, "_PAYS", limit)
        monkeypatch.setattr(module, "available_bytes", lambda device: free)
        generate(own, text, Auto(trained=None), **settings)
        return is_rounded(own, "int4")

    assert not rounded(limit=11, free=None)
    assert not rounded(limit=0, free=2 * own.num_parameters())
    assert rounded(limit=8, free=3 * own.num_parameters())
    assert rounded(limit=11, free=None)
    own.model.layers[0].mlp.up_proj.weight.data.neg_()
    assert not rounded(limit=11, free=None)

"""Whatever size is chosen, a method's text is plain decoding's; what is told is obeyed."""

import random

import pytest

from specattn.decoding import METHODS, generate
from specattn.decoding.drafting.gains import NONE
from specattn.decoding.drafting.pace import Share
from specattn.decoding.drafting.pacer import Pacer
from tests.decoding.fuzzing import drafter_of, model_of
from tests.decoding.models import prompts
from tests.decoding.pacing import with_costs

VOCABULARY = 24


def sized(kind):
    """Return a method that sizes its drafts by itself, with a random drafter where it needs one."""
    name, _, option = kind.partition(", ")
    if name in ("longspec", "poss", "eagle3", "medusa", "tokenswift"):
        given = {"drafter": drafter_of(name, "qwen3", VOCABULARY, 0.7)}
        given |= {"gamma": "auto"} if option else {}
        given |= {"budget": 30, "sinks": 2} if name == "tokenswift" else {}
        return METHODS[name](**given)
    if name in ("vegas", "streaming", "quest", "specextend", "triforce"):
        small = drafter_of("small", "qwen3", VOCABULARY, 0.7)
        return METHODS[name](min_tokens=4, **({"draft": small} if option else {}))
    return METHODS[name]()


KINDS = (
    *("longspec", "longspec, chain", "poss", "eagle3", "medusa", "tokenswift"),
    "token_recycling",
    *("prompt_lookup", "vegas", "streaming", "quest", "specextend", "triforce"),
    *("cast", "triforce, small model", "suffix"),
)
SAMPLING = ({"temperature": 0}, {"temperature": 1.0, "top_k": 0, "seed": 5})


@pytest.mark.parametrize("kind", KINDS)
def test_a_method_drafts_nothing_where_rows_are_dear_and_much_where_they_are_free(
    monkeypatch, kind
):
    model, texts = model_of("qwen3", VOCABULARY, 0.7), prompts([30], vocabulary=VOCABULARY)
    drafted = {}
    for costly in (True, False):
        with_costs(monkeypatch, lambda rows, costly=costly: 100.0**rows if costly else 1.0)
        found = generate(model, texts, sized(kind), max_new_tokens=30, temperature=0)
        drafted[costly] = found.statistics.total.drafted
        monkeypatch.undo()
    assert drafted[True] == 0
    assert drafted[False] >= 8


@pytest.mark.parametrize(
    ("sampling", "compile"),
    [
        pytest.param(SAMPLING[0], "auto", id="greedy-auto"),
        pytest.param(SAMPLING[1], "off", id="sampled-off"),
        pytest.param(SAMPLING[0], "off", id="greedy-off", marks=pytest.mark.slow),
        pytest.param(SAMPLING[1], "auto", id="sampled-auto", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_chosen_the_text_is_that_of_plain_decoding(
    monkeypatch, kind, sampling, compile
):
    """Efforts and rows are random, for a batch whose requests end apart."""
    model = model_of("qwen3", VOCABULARY, 0.7)
    texts = prompts([5, 17, 30], vocabulary=VOCABULARY)
    generator = random.Random(7)

    def choose(self, root, depth):
        fitting = [effort for effort in self.efforts if effort.depth <= depth]
        return generator.choice([NONE, *fitting])

    def rows(self, effort, drafted, nodes):
        assert nodes().scores.shape[1] == drafted - 1
        return min(generator.choice([1, 2, 3, 4, 9, 17]), drafted)

    chain = Share.rows
    monkeypatch.setattr(Share, "choose", choose)
    monkeypatch.setattr(
        Share, "rows", lambda *given: (rows if hasattr(given[0].gains, "truth") else chain)(*given)
    )
    best = lambda self, chances: min(generator.choice([1, 2, 3, 4]), 1 + len(chances[0]))  # noqa: E731
    monkeypatch.setattr(Pacer, "best_rows", best)
    options = {"max_new_tokens": 24, "compile": compile, **sampling}
    found = generate(model, texts, sized(kind), **options)
    if kind != "suffix":  # whose own choice it is
        assert found.statistics.total.drafted > 0
    assert found.new_tokens == generate(model, texts, "plain", **options).new_tokens


def test_what_is_told_is_obeyed():
    """Explicit sizes are drafted in every round, from the first one on."""
    model, text = model_of("qwen3", VOCABULARY, 0.7), prompts([30], vocabulary=VOCABULARY)
    drafters = {
        kind: drafter_of(kind, "qwen3", VOCABULARY, 0.7) for kind in ("longspec", "poss", "medusa")
    }
    methods = {
        11: METHODS["longspec"](drafters["longspec"], widths=(3, 8)),
        7: METHODS["poss"](drafters["poss"], width=3, depth=3, total_tokens=8),
        6: METHODS["medusa"](drafters["medusa"], widths=(2, 2)),
        9: METHODS["token_recycling"](nodes=9, k=3),
        3: METHODS["streaming"](gamma=3),
    }
    for drafted, method in methods.items():
        found = generate(model, text, method, max_new_tokens=12, temperature=0, seed=None)
        total = found.statistics.total
        ends = 3 * drafted  # the last rounds have no use for whole drafts
        assert drafted * total.rounds - ends <= total.drafted <= drafted * total.rounds
        assert "ms of a pass" not in found.statistics.details

"""What a request's text offers to draft, and whose text that is."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the methods of decoding need it")
from hypothesis import given
from hypothesis import strategies as st

from specattn.decoding.methods.prompt_lookup import SuffixIndex
from specattn.integrations.vllm.texts import Chain, Copies, Text, Texts, latest, likeliest_path
from specattn.planning.models import EMBEDDED_TARGET


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 4))
def test_the_latest_occurrence_is_the_one_that_an_index_finds(tokens, longest):
    index = SuffixIndex(longest)
    index.extend(tokens)
    matched, begin = latest(np.array(tokens, dtype=np.int32), longest)
    length, copied = index.match(5)
    assert (matched, tokens[begin : begin + 5] if matched else []) == (length, copied)


def test_a_path_follows_the_first_child():
    path = likeliest_path([-1, -1, 0, 0, 2], [5, 6, 7, 8, 9], [0.6, 0.3, 0.5, 0.1, 0.2])
    assert path == ([5, 7, 9], [0.6, 0.5, 0.2])


def texts(**options):
    return Texts(100, "no-folder", 8, **options)


def chain_of(text: Text, tokens, length=8):
    text.extend(tokens, 1)
    return text.chain(np.array(tokens, dtype=np.int32), length)


PASSAGE = list(range(20, 40))


def test_a_text_is_drafted_from_itself(each_index):
    chain = chain_of(texts().new(), [*PASSAGE, 1, 2, *PASSAGE[:5]])
    assert chain.tokens == PASSAGE[5:13]
    assert sorted(chain.chances, reverse=True) == chain.chances
    assert 1 >= chain.chances[0] > chain.chances[-1] > 0


@pytest.mark.parametrize("remember", [False, True])
def test_no_text_shows_in_another_unless_that_is_wanted(remember, each_index):
    known = texts(remember=remember)
    first = known.new()
    first.extend([1, 2, 3, *PASSAGE], len(PASSAGE))
    beside = known.new()
    assert chain_of(beside, [7, *PASSAGE[:4]]).tokens == [], "the first one still runs"
    known.ended(first)
    drafted = chain_of(known.new(), [7, *PASSAGE[:4]]).tokens
    assert drafted == (PASSAGE[4:12] if remember else [])


def test_how_true_copies_came_is_known_of_one_request_alone():
    known = texts()
    one, other = known.new(), known.new()
    assert one.copies is not other.copies
    remembered = texts(remember=True)
    assert remembered.new().copies is remembered.new().copies


def test_copies_that_never_come_true_lose_their_chance():
    nothing = SimpleNamespace(extend=lambda *given: None, draft=lambda *given: ([], [], []))
    text = Text(nothing, Copies(8))  # prompt lookup alone
    written = [1, 2]
    first = chain_of(text, written)
    assert first.tokens == []
    chances = []
    for step in range(12):  # 1 comes again and again, each time something else follows
        written += [50 + step, 1]
        text.extend(written[-2:], 2)
        chances.append(text.chain(np.array(written, dtype=np.int32), 4).chances[:1])
    assert chances[0][0] > 0.2
    assert chances[-1] == [] or chances[-1][0] < chances[0][0] / 3


@pytest.mark.parametrize("true", [True, False])
def test_chances_are_believed_as_far_as_such_came_true(monkeypatch, true):
    """Whatever was drafted: the first token offered is judged, and all behind true ones."""
    offered = Chain([5, 6, 7], [0.5, 0.25, 0.125])
    monkeypatch.setattr("specattn.integrations.vllm.texts.likeliest_path", lambda *given: offered)
    text, written = texts().new(), [1, 2]
    first = chain_of(text, written).chances
    assert first == pytest.approx([0.45, 0.45**2, 0.45**3])
    for step in range(20):
        came = [5, 6, 7] if true else [20 + step]
        written += came
        text.extend(came, len(came))
        last = text.chain(np.array(written, dtype=np.int32), 8).chances
    assert last[2] > 0.85 if true else last[0] < first[0] / 3


def test_a_draft_without_room_is_empty():
    assert chain_of(texts().new(), [1, 2, 1], length=0).tokens == []


def test_a_corpus_needs_a_tokenizer(tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("some text")
    with pytest.raises(ValueError, match=r"corpus: needs the target's tokenizer"):
        texts(corpus=(file,))


def test_a_corpus_is_looked_up(each_index, tmp_path):
    file = tmp_path / "corpus.txt"
    file.write_text("one two three four five six seven eight nine ten")
    known = Texts(4096, str(EMBEDDED_TARGET), 8, corpus=(file,))
    tokens = known.corpora.tokenizer(file.read_text())["input_ids"]
    assert chain_of(known.new(), tokens[:6]).tokens == tokens[6:14]

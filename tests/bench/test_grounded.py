"""Grounded requests: what they are made of, and that a reference plays the target as it should."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from specattn.decoding.passes.attention import CaptureSpec
from specattn.planning.models import EMBEDDED_TARGET
from specattn.tree import Tree

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import run_decoding  # noqa: E402
from decoding import grounded  # noqa: E402
from decoding.targets import REFERENCE_NOTE, ReferenceTarget, on_reference  # noqa: E402
from tests.decoding.models import tiny_model  # noqa: E402


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED_TARGET)


@pytest.mark.parametrize("kind", grounded.KINDS)
def test_a_prompt_has_its_document_and_its_length(kind, tokenizer):
    made = grounded.Grounded(tokenizer, kind)
    prompts = [made.prompts(number, 3000, 1)[0] for number in range(3)]
    references = [made.references(number, 3000, 1)[0] for number in range(3)]
    assert [len(prompt) for prompt in prompts] == [3000] * 3
    assert min(len(reference) for reference in references) >= 240
    assert len({tuple(prompt.tolist()) for prompt in prompts}) == 3
    assert torch.equal(torch.stack(made.prompts(0, 3000, 2)), torch.stack(prompts[:2]))
    if kind in grounded.WRITTEN:
        for number, item in enumerate(grounded._written_requests()[kind]):
            text = tokenizer.decode(prompts[number])
            assert text.endswith(item["asked"])
            assert all(grounded._topics()[topic][:400] in text for topic in item["topics"])
            assert tokenizer.decode(references[number]) == item["answer"]
    if kind == "code":
        whole = tokenizer(grounded._module(1))["input_ids"]
        assert [*prompts[1].tolist(), *references[1].tolist()] == whole


def test_the_topics_asked_about_move_through_the_document(tokenizer):
    made = grounded.Grounded(tokenizer, "question")
    places = []
    for number, item in enumerate(grounded._written_requests()["question"]):
        text = tokenizer.decode(made.prompts(number, 8000, 1)[0])
        places.append(text.index(grounded._topics()[item["topics"][0]][:400]) / len(text))
    assert places[0] == 0
    assert 0.2 < places[1] < 0.6 < places[2]


def test_edits_are_what_was_asked_for():
    code = "def add(left, right):\n    # Both of them.\n\n    return left + right + left\n"
    asked, edited = grounded.rename(code)
    assert asked == "Rename `left` to `given_left`."
    assert edited == code.replace("left", "given_left")
    assert grounded.drop_comments(code)[1] == (
        "def add(left, right):\n    return left + right + left"
    )
    assert grounded.annotate("def add(a, b):\n    return a + b\n")[1] == (
        "def add(a, b) -> Any:\n    result = a + b\n    return result\n"
    )


def test_an_unknown_kind_is_refused(tokenizer):
    with pytest.raises(ValueError, match="kind: expected one of question, .*, got 'poem'"):
        grounded.Grounded(tokenizer, "poem")


def test_nodes_on_the_reference():
    #         root 7, children 1 and 2 of the root, 3 below 2, 4 below 3, 3 below 1
    parents, tokens = [-1, 0, 0, 2, 3, 1], [7, 1, 2, 3, 4, 3]
    assert on_reference(parents, tokens, [2, 3, 5, 6]) == [(0, 0), (2, 1), (3, 2)]
    assert on_reference(parents, tokens, [2, 3]) == [(0, 0), (2, 1)]
    assert on_reference(parents, tokens, []) == []
    assert on_reference([-1, -1], [7, 7], [7, 7]) == [(0, 0)], "padding is no node"


def accepted_by_hand(tokenizer, context, new_tokens):
    """Count prompt lookup's rounds over a question's reference by searching lists."""
    made = grounded.Grounded(tokenizer, "question")
    text = made.prompts(0, context, 1)[0].tolist()
    rest = made.references(0, context, 1)[0].tolist()[:new_tokens]
    rounds = 0
    while rest:
        draft = []
        for n in (3, 2, 1):
            places = [i for i in range(n, len(text)) if text[i - n : i] == text[-n:]]
            if places:
                draft = text[places[-1] :][: min(10, len(rest) - 1)]
                break
        hits = 0
        while hits < len(draft) and draft[hits] == rest[hits]:
            hits += 1
        text, rest, rounds = text + rest[: hits + 1], rest[hits + 1 :], rounds + 1
    return rounds


def test_the_suite_measures_and_says_what_is_simulated(tmp_path, capsys, monkeypatch, tokenizer):
    monkeypatch.setattr("common.clock.last_level_cache", lambda device: 1 << 18)
    path = tmp_path / "rows.jsonl"
    arguments = ["--suite", "grounded", "--context", "600", "--new-tokens", "24", "--texts", "1"]
    arguments += ["--repeats", "1", "--device", "cpu", "--json", str(path)]
    arguments += ["--method", "prompt_lookup", "--method", "suffix:nodes=64"]
    arguments += ["--method", "prompt_lookup:gamma=10"]
    assert run_decoding.main(arguments) == 0
    _, *rows = map(json.loads, path.read_text().splitlines())
    own = [row for row in rows if "own" in row["section"]]
    simulated = [row for row in rows if row not in own]
    assert [row["section"] for row in simulated[::3]] == list(grounded.KINDS)
    assert {row["acceptance"] for row in simulated} == {REFERENCE_NOTE}
    assert {row["acceptance"] for row in own} == {"measured"}
    shares = [row["details"]["model ranks the reference first"] for row in simulated]
    assert all(0 < share < 1 for share in shares)
    looked_up = simulated[2]  # of one size, whatever the clock says
    assert looked_up["rounds"] == accepted_by_hand(tokenizer, 600, 24)
    assert looked_up["tau"] == pytest.approx(24 / looked_up["rounds"])
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(REFERENCE_NOTE) and "prompt_lookup" in line for line in said) > 5


def test_a_reference_has_neither_scores_nor_queries():
    target = ReferenceTarget(tiny_model(), 1, 40, references=[torch.arange(4)])
    with pytest.raises(ValueError, match="a reference has logits, but neither scores nor queries"):
        target.verify(Tree.chain(0), torch.zeros(1, 1).long(), capture=CaptureSpec(queries=True))

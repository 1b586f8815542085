"""A method is added by writing its file: nothing else names it."""

import importlib
import sys
from pathlib import Path

import pytest

from specattn.decoding import METHODS, generate, methods, parse_method
from specattn.decoding.engine.method import Method
from tests.decoding.models import greedy_by_transformers, prompts, tiny_model

TOY = '''
"""Draft the last committed token again and again."""

from dataclasses import dataclass

from specattn.decoding.engine.contract import Draft, Drafter
from specattn.decoding.engine.method import Method
from specattn.tree import Tree


@dataclass(frozen=True)
class Toy(Method, name="toy"):
    gamma: int = 2

    @property
    def max_nodes(self):
        return self.gamma + 1

    def start(self, context):
        return ToyDrafter(Tree.chain(self.gamma))


class ToyDrafter(Drafter):
    def __init__(self, tree):
        self.tree = tree

    def propose(self, root):
        return Draft(self.tree, root[:, None].repeat(1, self.tree.size))
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Let a file lie in the methods' folder for the length of a test."""
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    yield importlib.import_module("specattn.decoding.methods.toy")
    METHODS.pop("toy")
    sys.modules.pop("specattn.decoding.methods.toy")


def test_a_file_is_all_that_a_method_needs(toy):
    assert METHODS["toy"] is toy.Toy
    assert parse_method("toy:gamma=3") == ("toy", {"gamma": 3})
    model, texts = tiny_model("qwen3"), prompts([5, 12])
    output = generate(model, texts, "toy:gamma=3", max_new_tokens=12)
    assert output.new_tokens == [greedy_by_transformers(model, text, 12) for text in texts]
    assert output.statistics.total.drafted == 3 * output.statistics.total.rounds


def test_every_file_of_the_folder_is_imported():
    names = [path.stem for path in Path(methods.__file__).parent.glob("*.py")]
    assert all(f"specattn.decoding.methods.{n}" in sys.modules for n in names if n != "__init__")
    assert all(method.name == name for name, method in METHODS.items())


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("prompt_lookup:longest=", "longest"),
        ("poss:window=", "window"),
        ("streaming:sinks=", "sinks"),
        ("longspec:gamma=", "gamma"),
    ],
)
@pytest.mark.parametrize("huge", [2**31, 10**18, 10**30])
def test_an_option_beyond_32_bits(text, option, huge):
    """Some have a method look for so many tokens, others do not fit into what kernels count."""
    with pytest.raises(ValueError, match=f"{option}: expected an integer up to 2147483647, got"):
        parse_method(f"{text}{huge}")
    with pytest.raises(ValueError, match="widths: expected an integer up to 2147483647, got"):
        parse_method(f"longspec:widths=[4,{huge}]")


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="a method named 'plain' exists: Plain"):

        class Other(Method, name="plain"):
            pass

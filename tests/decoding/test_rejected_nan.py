"""A draft that is rejected may be of numbers that are none: the text does not know it was there."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from specattn.decoding import Draft, Drafter, Method, generate
from specattn.tree import Tree
from tests.decoding.models import prompts, tiny_model

VOCABULARY, BAD, ORDINARY = 4096, 3000, 0.5
LENGTHS, NEW_TOKENS = (30, 9), 24
TREES = {"leaf": [-1, 0, 0, 2], "branch": [-1, 0, 0, 1, 2], "chain": [-1, 0, 1]}
FAMILIES = ("qwen3", "gpt_oss", "mistral", "deepseek_v3", "qwen3_5")
QUICK = ("qwen3", "qwen3_5")


@dataclass
class _Knowing(Drafter):
    """Drafts what follows, beside a token that nobody would write."""

    parents: list
    texts: list
    at: list = field(init=False)

    def __post_init__(self):
        self.at = [0] * len(self.texts)

    def propose(self, root):
        tree = Tree(self.parents)
        tokens = torch.full((len(root), tree.size), BAD)
        tokens[:, 0] = root
        for row, (text, at) in enumerate(zip(self.texts, self.at, strict=True)):
            following = [*text[at:], 0, 0]
            if self.parents[2] == 0:  # the node 1 is bad, and node 2 and what follows it right
                tokens[row, 2] = following[0]
                tokens[row, self.parents.index(2)] = following[1]
            else:
                tokens[row, 1] = following[0]  # and node 2, behind it, bad
        return Draft(tree, tokens)

    def observe(self, verified):
        self.at = [at + 1 + count for at, count in zip(self.at, verified.counts, strict=True)]

    def compact(self, rows):
        self.texts, self.at = ([x[row] for row in rows] for x in (self.texts, self.at))


@dataclass(frozen=True)
class _Method(Method):
    parents: list
    texts: list

    @property
    def max_nodes(self):
        return len(self.parents)

    def start(self, context):
        return _Knowing(self.parents, self.texts)


def each_family():
    """Yield every family; quickly one with keys and one with states as well."""
    for name in FAMILIES:
        yield pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)


@pytest.fixture(scope="module", params=each_family())
def model(request):
    """Return a model, and its texts by what they were asked with."""
    sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    return tiny_model(request.param, **sizes), {}


def text_of(model, method, dtype, value, **options):
    """Return the output of a method while the embedding of a token is `value`."""
    weights = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    kept = [weight[BAD].clone() for weight in weights]
    model.to(dtype)
    given = prompts(LENGTHS)
    try:
        with torch.no_grad():
            generate(model, given, "plain", max_new_tokens=2, temperature=0, **options)  # proves it
            for weight, bad in zip(weights, (value, 0), strict=True):
                weight[BAD] = bad  # of finite logits, never the likeliest
        return generate(model, given, method, max_new_tokens=NEW_TOKENS, temperature=0, **options)
    finally:
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight[BAD] = before
        model.to(torch.float32)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("dtype", "value", "options"),
    [
        (torch.float32, torch.nan, {"compile": "on"}),
        (torch.float32, torch.inf, {"compile": "off"}),
        (torch.bfloat16, torch.inf, {"compile": "on"}),
        (torch.float16, torch.nan, {"compile": "on"}),
        (torch.float32, torch.inf, {"compile": "on", "kv_dtype": "int8"}),
        (torch.float32, torch.nan, {"compile": "off", "kv_dtype": "fp8"}),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x).split(".")[-1],
)
def test_a_rejected_token_leaves_no_trace(model, rounding_ties, dtype, value, options, tree):
    """The text is that of the same drafts while the token is an ordinary one."""
    model, plain = model
    key = dtype, *options.values()
    plainly = partial(text_of, model, "plain", dtype, ORDINARY, **options)
    if key not in plain:
        plain[key] = plainly().new_tokens
    method = _Method(TREES[tree], plain[key])
    wanted, output = (text_of(model, method, dtype, x, **options) for x in (ORDINARY, value))
    assert output.new_tokens == wanted.new_tokens
    if "kv_dtype" in options:
        rounding_ties.check(output.new_tokens, plain[key], plainly)
    else:
        assert dtype != torch.float32 or output.new_tokens == plain[key]
    assert output.statistics.total.acceptance_rate > 0.1, "what follows was drafted"

"""The loop with drafters that only tests have: branching trees, one per request, good and bad."""

from dataclasses import dataclass

import pytest
import torch
from transformers import StoppingCriteria

from specattn.acceptance import sample_children
from specattn.decoding import Draft, Drafter, Method, generate, prove
from specattn.tree import Tree
from tests.cases import random_parents
from tests.decoding.models import (
    CONFIGS,
    VOCABULARY,
    greedy_by_transformers,
    prompts,
    tiny_model,
)

# What the cache holds beyond a request's length is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")


def oracle_parents(size, hops, generator):
    """Return a random tree and a random path of at most `hops` steps down it, without the root."""
    parents = random_parents(size, generator)
    path = [0]
    while len(path) <= hops:
        children = [node for node, parent in enumerate(parents) if parent == path[-1]]
        if not children:
            break
        path.append(children[int(torch.randint(0, len(children), (), generator=generator))])
    return parents, path[1:]


@dataclass(frozen=True)
class Oracle(Method):
    """Hides the next tokens of known texts in random trees; all other nodes are random."""

    texts: tuple = ()
    size: int = 9
    hops: int = 3
    shared: bool = False  # one tree for all requests, each with its own tokens

    @property
    def max_nodes(self):
        return self.size

    def start(self, context):
        return OracleDrafter(self, context.sequences)


class OracleDrafter(Drafter):
    def __init__(self, method, sequences):
        self.method, self.sequences = method, sequences
        self.random = torch.Generator().manual_seed(0)

    def propose(self, root):
        size, shapes = self.method.size, []
        for _ in self.sequences.active:
            nodes = int(torch.randint(size // 2, size + 1, (), generator=self.random))
            shapes.append(oracle_parents(nodes, self.method.hops, self.random))
        if self.method.shared:
            shapes = [shapes[0]] * len(shapes)
        trees = [Tree(parents) for parents, _ in shapes]
        tree = trees[0] if self.method.shared else Tree.stack(trees, size=size)
        tokens = torch.randint(0, VOCABULARY, (len(root), tree.size), generator=self.random)
        tokens[:, 0] = root
        for request, (row, (_, path)) in enumerate(zip(self.sequences.active, shapes, strict=True)):
            generated = len(self.sequences.generated(row))
            for node, token in zip(path, self.method.texts[row][generated:], strict=False):
                tokens[request, node] = token
        return Draft(tree, tokens)


@pytest.mark.parametrize("shared", [False, True], ids=["own-trees", "shared-tree"])
@pytest.mark.parametrize("family", CONFIGS)
def test_branching_drafts_change_nothing(family, shared):
    model, texts = tiny_model(family), prompts([5, 23, 40])
    expected = [greedy_by_transformers(model, p, 20) for p in texts]
    method = Oracle(texts=tuple(map(tuple, expected)), shared=shared)
    output = generate(model, texts, method, max_new_tokens=20)
    assert output.new_tokens == expected
    assert output.statistics.total.mean_acceptance_length > 1.5


def test_wide_trees_need_more_than_one_mask_word():
    model, texts = tiny_model("gpt_oss"), prompts([9, 30])
    expected = [greedy_by_transformers(model, p, 20) for p in texts]
    method = Oracle(texts=tuple(map(tuple, expected)), size=100, hops=8)
    output = generate(model, texts, method, max_new_tokens=20)
    assert output.new_tokens == expected
    assert output.statistics.total.mean_acceptance_length > 1.5


@dataclass(frozen=True)
class Drafts(Method):
    """Drafts what a function of the roots does, and says that it has `nodes` nodes at most."""

    make: object = None
    nodes: int = 4

    @property
    def max_nodes(self):
        return self.nodes

    def start(self, context):
        drafter = Drafter()
        drafter.propose = self.make
        return drafter


def nodes_of(root, count, dtype=torch.int64):
    return torch.ones(len(root), count, dtype=dtype).index_copy_(
        1, torch.tensor([0]), root[:, None].to(dtype)
    )


@pytest.mark.parametrize("compile", ["auto", "off"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda root: Draft(Tree.chain(2), nodes_of(root, 4)),
            r"draft: expected tokens \[B = 2, T = 3\] of int64 for its tree, got \[2, 4\] of",
        ),
        (
            lambda root: Draft(Tree.chain(3), nodes_of(root, 4)[:1]),
            r"expected tokens \[B = 2, T = 4\] of int64 for its tree, got \[1, 4\] of torch.int64",
        ),
        (
            lambda root: Draft(Tree.chain(3), nodes_of(root, 4, torch.int32)),
            r"expected tokens \[B = 2, T = 4\] of int64 for its tree, got \[2, 4\] of torch.int32",
        ),
        (
            lambda root: Draft(Tree([[-1, 0]] * 3), nodes_of(root, 2)),
            "draft: 3 trees were drafted for 2 requests",
        ),
        (
            lambda root: Draft(Tree([-1] + [0] * 89), nodes_of(root, 90)),
            "the tree has 90 nodes, and the cache has room for 13: the method's max_nodes must",
        ),
    ],
    ids=["tokens", "requests", "int32", "trees", "nodes"],
)
def test_drafts_that_do_not_fit_are_named(make, message, compile):
    """Before, whatever kernel or module met them first said so in its own words."""
    model, texts = tiny_model("qwen3"), prompts([5, 9])
    with pytest.raises(ValueError, match=message):
        generate(model, texts, Drafts(make), max_new_tokens=8, compile=compile)


def test_tokens_may_lie_anyhow():
    model, texts = tiny_model("qwen3"), prompts([5, 9])
    method = Drafts(lambda root: Draft(Tree.chain(2), torch.stack([root, root + 0, root + 0]).T))
    output = generate(model, texts, method, max_new_tokens=8)
    assert output.new_tokens == [greedy_by_transformers(model, p, 8) for p in texts]


class StopAt(StoppingCriteria):
    """Stops a row at a token, given by the row's first prompt token."""

    def __init__(self, ends):
        self.ends = ends

    def __call__(self, input_ids, scores, **_):
        ends = [self.ends.get(int(row[0]), -1) == len(row) for row in input_ids]
        return torch.tensor(ends, device=input_ids.device)


def test_finished_requests_leave_and_the_rest_goes_on():
    """Requests end one after the other, in the middle of drafts; rows are moved each time."""
    model = tiny_model("qwen3-sliding")
    texts = [torch.cat([torch.tensor([n]), p]) for n, p in enumerate(prompts([11] * 5))]
    expected = [greedy_by_transformers(model, p, 20) for p in texts]
    new = {0: 3, 1: 20, 2: 4, 3: 15, 4: 9}
    rounds = []
    output = generate(
        model,
        texts,
        Oracle(texts=tuple(map(tuple, expected))),
        max_new_tokens=20,
        stopping_criteria=[StopAt({row: 12 + n for row, n in new.items()})],
        on_tokens=lambda request, tokens: rounds.append(request),
    )
    assert output.new_tokens == [text[: new[row]] for row, text in enumerate(expected)]
    statistics = output.statistics
    assert [request.rounds for request in statistics.requests] == [
        rounds.count(n) for n in range(5)
    ]
    assert statistics.requests[0].rounds < statistics.requests[1].rounds


def test_a_finished_request_is_not_computed():
    model = tiny_model("llama")
    batches = []
    forward = model.model.forward

    def recording(*args, **kwargs):
        batches.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    model.model.forward = recording
    prove(model)  # before its passes are counted
    batches.clear()
    texts = [torch.tensor([n, 9]) for n in range(3)]
    ends = {0: 2 + 2, 1: 2 + 5, 2: 2 + 3}
    options = {"max_new_tokens": 9, "stopping_criteria": [StopAt(ends)], "compile": "off"}
    generate(model, texts, "plain", **options)
    assert batches == [3] + [3, 3, 2, 1, 1]


@dataclass(frozen=True)
class RandomTree(Method):
    """Samples every node's children from a fixed distribution, without replacement."""

    widths: tuple = (2, 2)
    probs: tuple = ()

    @property
    def max_nodes(self):
        return Tree.full(self.widths).size

    def start(self, context):
        return RandomTreeDrafter(self, context.generator)


class RandomTreeDrafter(Drafter):
    def __init__(self, method, generator):
        self.tree = Tree.full(method.widths)
        self.widths, self.generator = method.widths, generator
        self.probs = torch.tensor(method.probs)

    def propose(self, root):
        batch, level, tokens = len(root), 1, [root[:, None]]
        for width in self.widths:
            probs = self.probs.expand(batch, level, -1)
            children = sample_children(probs, width, generator=self.generator)
            tokens.append(children.flatten(1))
            level *= width
        return Draft(self.tree, torch.cat(tokens, 1), self.probs.expand(batch, self.tree.size, -1))

"""Captured passes of our kernels over all kinds of caches, numbers and rows: the modules' own."""

import pytest
import torch

import specattn
from specattn.decoding.passes.attention import CaptureSpec, Choice, Selection
from specattn.tree import Tree
from tests.decoding.models import WINDOW, prompts, tiny_model
from tests.selections import expected_table

if specattn.backends()["triton"] != "available":
    pytest.skip("Triton is not available here", allow_module_level=True)

from specattn.decoding import Target
from tests.decoding.captured import FEW, LENGTHS, assert_alike, captured_runner, two_targets

SLOW = pytest.mark.slow
TREE = Tree([-1, 0, 0, 1, 1, 2, 5])


def both(targets, run):
    """Return what is run with each target: with that of modules by other kernels."""
    with torch.no_grad():
        with specattn.use_backend("triton"):
            found = run(targets[0])
        return found, run(targets[1])


def verified(targets, tree, seed=3, **options):
    """Return what each target makes of a tree of tokens."""
    tokens = torch.stack(prompts([tree.size] * len(LENGTHS), seed=seed))
    return both(targets, lambda target: target.verify(tree, tokens, **options))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW)], ids=str
)
def test_sixteen_bits(dtype):
    model = tiny_model("qwen3", peak=1.0, **FEW).to(dtype)
    found, expected = verified(two_targets(model)[0], TREE)
    assert found.logits.dtype == found.features.dtype == dtype
    assert_alike(model, found.logits, expected.logits)
    assert_alike(model, found.features, expected.features)


@pytest.mark.parametrize(
    "capture",
    [
        pytest.param(CaptureSpec((0, -1)), marks=SLOW),
        pytest.param(CaptureSpec((-1,), per_head=True), marks=SLOW),  # below with a choice
        pytest.param(CaptureSpec((0, 2), ranking="weight"), marks=SLOW),
        CaptureSpec((0, 2), per_row=True),
        pytest.param(CaptureSpec(queries=True), marks=SLOW),  # Quest's text: test_fused_pass
    ],
    ids=["rows", "per head", "weights", "per row", "queries"],
)
def test_what_is_captured_beside(capture):
    """In the first run of a graph and in its replay."""
    model = tiny_model("llama", peak=1.0, **FEW | {"num_hidden_layers": 2})
    targets, graphs = two_targets(model)
    for seed in (3, 4):
        found, expected = verified(targets, TREE, seed, capture=capture)
        assert_alike(model, found.logits, expected.logits)
        for own, exact in ((found.scores, expected.scores), (found.queries, expected.queries)):
            assert (own is None) == (exact is None)
            if own is not None:
                assert own.shape == exact.shape
                nowhere = exact == -torch.inf
                assert torch.equal(own == -torch.inf, nowhere)
                assert_alike(model, own.masked_fill(nowhere, 0), exact.masked_fill(nowhere, 0))
    assert [graph.replays for graph in graphs] == [2]


@pytest.mark.parametrize(
    ("per_head", "ranking"),
    [  # a text whose drafts are chosen by logits of all heads: test_chains_in_graphs
        (True, "weight"),
        *(
            pytest.param(*one, marks=SLOW)
            for one in ((False, "logit"), (False, "weight"), (True, "logit"))
        ),
    ],
)
def test_what_the_next_draft_reads_is_chosen_in_the_graph(per_head, ranking):
    """By one launch for all layers; the next pass leaves it alone."""
    model = tiny_model("llama", peak=1.0, **FEW | {"num_hidden_layers": 2})
    targets, graphs = two_targets(model)
    options = {"ratio": 0.3, "min_tokens": 3, "keep_first": 1}
    choice, found = Choice(tuple(options.items()), newer=5), []
    capture = CaptureSpec((0, -1), ranking, per_head=per_head, choice=choice)
    for seed in (3, 4):
        one, other = verified(targets, TREE, seed, capture=capture)
        assert other.selection is None  # left to who has the scores
        prefix = targets[0].cache.seqlens
        found.append((one.selection, expected_table(one.scores, prefix, 5, options)))
    for (indices, lengths, ahead), (table, counts) in found:
        assert torch.equal(indices, table)
        assert torch.equal(lengths, counts)
        assert ahead == 0
    (graph,) = graphs
    assert graph.replays == 2
    assert graph.tape.kernels[-1] == "select_kernel"
    assert graph.tape.kernels.count("select_kernel") == 1


def test_a_sparse_selection():
    """Of few tokens, of none, and other ones in the replay; a chain sees itself as well."""
    model = tiny_model("qwen3", peak=1.0, **FEW)
    targets, graphs = two_targets(model)
    lengths, limits = torch.tensor([0, 8], dtype=torch.int32), torch.tensor(LENGTHS)
    for seed in (3, 4):
        generator = torch.Generator().manual_seed(seed)
        kept = torch.stack([torch.randperm(19, generator=generator)[:8] for _ in range(2)])
        indices = kept.unflatten(0, (1, 2)).sort(-1).values % limits[:, None]
        tokens = torch.stack(prompts([3, 3], seed=seed))
        selection = Selection(indices.int(), lengths)
        found, expected = both(targets, lambda one: one.draft(tokens, 1, selection))  # noqa: B023
        assert_alike(model, found.logits, expected.logits)
    assert [graph.replays for graph in graphs] == [2]


@pytest.mark.parametrize(
    "kv_dtype", ["int8", pytest.param("fp8", marks=SLOW), pytest.param("fp8_e5m2", marks=SLOW)]
)
def test_caches_of_eight_bits(kv_dtype):
    """Of the numbers that are written, rounding may move a few by a step, and so the logits."""
    model = tiny_model("llama", peak=1.0, **FEW | {"num_hidden_layers": 2})
    targets, _ = two_targets(model, kv_dtype=kv_dtype)
    found, expected = verified(targets, TREE)
    assert (found.logits - expected.logits).norm() < 0.01 * expected.logits.norm()
    for layer in range(2):
        own, exact = (target.cache.numbers(target.cache.rows(layer)) for target in targets)
        for b, start in enumerate(LENGTHS):
            new = slice(start - 1, start - 1 + TREE.size)
            assert exact[:, b, new].abs().amax(-1).min() > 0
            off = (own - exact)[:, b, new].abs() > 1e-5 * exact[:, b, new].abs().max()
            assert off.float().mean() < 0.01


@pytest.mark.parametrize("family", ["gemma2", pytest.param("gpt_oss", marks=SLOW)])
def test_padding_rows_beside_windows(family):
    """Trees of 7 and of 6 rows are padded to 8, in one graph: no row sees what was added."""
    model = tiny_model(family, peak=1.0, **FEW | {"num_hidden_layers": 2})
    targets, graphs = two_targets(model)
    targets[0].cache.spare = 8
    assert sorted(targets[0].windows, key=bool) == [None, WINDOW]
    for tree in (TREE, Tree.chain(5)):
        found, expected = verified(targets, tree)
        assert_alike(model, found.logits, expected.logits)
        assert_alike(model, found.features, expected.features)
    assert [graph.replays for graph in graphs] == [2]


@pytest.mark.slow
def test_a_pass_of_more_rows_than_the_kernel_of_products_takes():
    model = tiny_model("llama", peak=1.0, **FEW)
    targets, graphs = two_targets(model, capacity=64)
    for seed in (3, 4):
        found, expected = verified(targets, Tree.chain(39), seed)
        assert_alike(model, found.logits, expected.logits)
    (graph,) = graphs
    assert graph.replays == 2
    products = {"linear_few_rows_kernel", "linear_codes_kernel", "mm", "addmm"}
    assert products & set(graph.tape.kernels) == {"mm", "addmm"}


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=SLOW), torch.bfloat16], ids=str
)
def test_the_bits_of_a_row_are_the_same_beside_any_others(dtype):
    """Of products and norms: attention, which may cut keys otherwise, adds nothing here."""
    model = tiny_model("qwen3", peak=1.0, **FEW).to(dtype)
    with torch.no_grad():
        model.base_model.layers[0].self_attn.o_proj.weight.zero_()
    target = Target(model, 1, 48, "off")
    target.runner = captured_runner(target)
    (tokens,) = prompts([16])
    with torch.no_grad():
        alone, few, all_ = (
            target.verify(Tree.chain(rows - 1), tokens[None, :rows]) for rows in (1, 5, 16)
        )
    for name in ("logits", "features"):
        whole = getattr(all_, name)
        assert whole.isfinite().all()
        assert torch.equal(getattr(alone, name), whole[:, :1])
        assert torch.equal(getattr(few, name), whole[:, :5])

"""DFlash and JetFlow: every way to run a block, the authors' folders, and what comes out."""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from specattn.blocks import Direct, captured, recorded
from specattn.decoding import DFlash, JetFlow, Target, generate
from specattn.decoding.drafting import grown, pruning
from specattn.decoding.methods import dflash as method
from specattn.decoding.methods.dflash import DFlashBlock
from specattn.drafters import DFlashDrafter
from tests.decoding.models import BATCHES, known, tiny_model
from tests.decoding.tape import TapeGraph
from tests.drafters.dflash_statement import SIZE, random_drafter

# What caches hold beyond what was written is then NaN, and must not matter.
pytestmark = pytest.mark.usefixtures("poisoned_empty")

V = 6
WAYS = {"eager": Direct, "recorded": recorded, "captured": lambda: captured(lambda: TapeGraph)}


@pytest.mark.parametrize(
    ("compile", "causal"),
    [
        pytest.param("on", False, id="on-bidirectional"),
        pytest.param("on", True, id="on-causal"),
        pytest.param("off", True, id="off-causal"),
        pytest.param("off", False, id="off-bidirectional", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{"width": 1}, {"width": 4, "total_tokens": 20}, {}, {"window": 6}, {"total_tokens": 256}],
    ids=str,
)
def test_the_text_is_that_of_plain_decoding(options, compile, causal):
    model, texts, expected = known("qwen3", (2, 17, 33), 40, vocabulary=V)
    drafter = random_drafter(model, causal=causal)
    output = generate(model, texts, DFlash(drafter, **options), max_new_tokens=40, compile=compile)
    assert output.new_tokens == expected
    if options.get("total_tokens"):
        assert output.statistics.total.accepted > 5
    sampled = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "compile": compile}
    plain = generate(model, texts, "plain", **sampled).new_tokens
    assert generate(model, texts, DFlash(drafter, **options), **sampled).new_tokens == plain


@pytest.mark.parametrize(("family", "lengths"), BATCHES)
def test_every_family(family, lengths):
    model, texts, expected = known(family, lengths, 24)
    method = DFlash(random_drafter(model), width=3, total_tokens=12)
    assert generate(model, texts, method, max_new_tokens=24).new_tokens == expected


@pytest.mark.parametrize("size", [2, 5, 64])
def test_a_causal_block_does_not_depend_on_how_much_is_drafted(size):
    """Rows that are not drafted from are not run: those before them are the same bits."""
    model, texts, expected = known("qwen3", (9,), 24, vocabulary=V)
    drafter = random_drafter(model, causal=True, block_size=size)
    for depth in (1, 3, 15):
        method = JetFlow(drafter, depth=depth, total_tokens=8)
        assert generate(model, texts, method, max_new_tokens=24).new_tokens == expected


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_what_is_drafted_is_the_same_in_every_way(monkeypatch, causal):
    """Trees of 255 nodes, round by round, in a batch whose texts end one after the other."""
    model, texts, expected = known("qwen3", (2, 17, 33), 24, vocabulary=V)
    drafter, rounds, sizes = random_drafter(model, causal=causal, block_size=16), {}, set()

    class Noting(DFlashBlock):
        def grow(self, root, width, depth):
            grown = super().grow(root, width, depth)
            rounds[way].append([grown.tokens.tolist(), grown.parents.tolist()])
            sizes.add(grown.tokens.shape[1])
            return grown

    monkeypatch.setattr(method, "DFlashBlock", Noting)
    for way, make in WAYS.items():
        rounds[way], programs = [], make()
        monkeypatch.setattr(Target, "programs", lambda self, own=programs: own)
        one = DFlash(drafter, total_tokens=256)
        assert generate(model, texts, one, max_new_tokens=24).new_tokens == expected
    assert rounds["eager"] == rounds["recorded"] == rounds["captured"]
    assert max(sizes) == 255


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_a_draft_is_one_launch(monkeypatch, causal):
    """The block, its best tokens and its tree are one graph; another catches up on the text."""
    model, texts, expected = known("qwen3", (2, 17, 33), 24, vocabulary=V)
    drafter = random_drafter(model, causal=causal, block_size=16)
    graphs, launches = [], []

    def graph():
        graphs.append(TapeGraph())
        return graphs[-1]

    class Counting(DFlashBlock):
        def catch_up(self):
            launches.append([])
            self.counted(super().catch_up)

        def grow(self, *given):
            return self.counted(super().grow, *given)

        def counted(self, run, *given):
            before = sum(one.replays for one in graphs)
            found = run(*given)
            launches[-1].append(sum(one.replays for one in graphs) - before)
            return found

    monkeypatch.setattr(method, "DFlashBlock", Counting)
    programs = captured(lambda: graph)
    monkeypatch.setattr(Target, "programs", lambda self: programs)
    one = DFlash(drafter, total_tokens=256)
    assert generate(model, texts, one, max_new_tokens=24).new_tokens == expected
    assert launches[0] == [0, 1]  # all of the prompt is known
    assert len(launches) > 5
    assert launches[1:] == [[1, 1]] * (len(launches) - 1)


VIEWS = "view expand slice select unsqueeze t transpose alias split unbind detach _unsafe_view"
VIEWS += " as_strided permute squeeze split_with_sizes _reshape_alias"


class Counted(TorchDispatchMode):
    """Counts operators that compute; what a tape replays is one launch, and none of them."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.found[name] += name not in VIEWS.split() and not name.startswith(
            ("empty", "new_empty")
        )
        return function(*args, **(kwargs or {}))


class Quiet(TapeGraph):
    def replay(self):
        with _disable_current_modes():
            super().replay()


def test_few_operators_stand_beside_the_graphs_of_a_draft(monkeypatch):
    """Of a given size, as on a GPU: nothing is sorted again, and nothing is chosen of the tree."""
    model, texts, expected = known("qwen3", (17,), 24, vocabulary=V)
    rounds, draft = [], grown._GrownDrafter.draft

    def counting(self, root, effort):
        with Counted() as counted:
            found = draft(self, root, effort)
        rounds.append(counted.found)
        return found

    monkeypatch.setattr(pruning, "kernels", lambda: None)
    monkeypatch.setattr(grown._GrownDrafter, "draft", counting)
    programs = captured(lambda: Quiet)
    monkeypatch.setattr(Target, "programs", lambda self: programs)
    one = DFlash(random_drafter(model, causal=True, block_size=16), total_tokens=64)
    assert generate(model, texts, one, max_new_tokens=24).new_tokens == expected
    assert len(rounds) > 5
    for found in rounds[2:-3]:  # the first ones capture, the last ones are less deep
        assert found["sort"] == found["searchsorted"] == 0
        assert sum(found.values()) <= 34, found


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(
    ("options", "most"), [({"total_tokens": 8}, 1), ({"width": 1, "total_tokens": 16}, 1), ({}, 7)]
)
def test_a_text_ends_without_a_graph_for_each_depth(monkeypatch, options, most, causal):
    """What is drafted less deep near the end is cut from the same graph, one for every effort."""
    model, texts, expected = known("qwen3", (2, 17), 24, vocabulary=V)
    drafter, graphs, drawn = random_drafter(model, causal=causal, block_size=16), [], []

    def graph():
        graphs.append(TapeGraph())
        return graphs[-1]

    class Noting(DFlashBlock):
        def grow(self, root, width, depth):
            before = len(graphs)
            grown = super().grow(root, width, depth)
            drawn.append((len(root), depth, len(graphs) - before))
            assert grown.nodes().levels.max() <= depth
            return grown

    monkeypatch.setattr(method, "DFlashBlock", Noting)
    programs = captured(lambda: graph)
    monkeypatch.setattr(Target, "programs", lambda self: programs)
    one = DFlash(drafter, **options)
    assert generate(model, texts, one, max_new_tokens=24).new_tokens == expected
    for batch in (1, 2):  # a graph is one batch's
        assert sum(made for rows, _, made in drawn if rows == batch) <= most
    if most == 1:
        assert len({depth for _, depth, _ in drawn}) > 5


@pytest.mark.parametrize("said", [None, False, True])
@pytest.mark.parametrize("given", [None, False, True])
def test_causal_is_what_the_folder_says_or_else_the_method(said, given):
    model, texts, expected = known("qwen3", (9,), 24, vocabulary=V)
    drafter = random_drafter(model, causal=said)
    if None not in (said, given) and said != given:
        with pytest.raises(ValueError, match=f"causal: {given} was given, the .* says {said}"):
            DFlash(drafter, causal=given).prepared(model)
        return
    assert DFlash(drafter, causal=given).prepared(model).causal == bool(said or given)
    output = generate(model, texts, DFlash(drafter, causal=given), max_new_tokens=24)
    assert output.new_tokens == expected


def test_jetflow_is_dflash_with_a_causal_head(tmp_path):
    model, texts, expected = known("qwen3", (9, 4), 24, vocabulary=V)
    own = OWN | {"causal_head": True}
    store(tmp_path / "causal", random_drafter(model), dflash_config=own)
    loaded = JetFlow(tmp_path / "causal").prepared(model)
    assert (loaded.causal, loaded.width) == (True, 7)
    store(tmp_path / "older", random_drafter(model))
    assert JetFlow(tmp_path / "older").prepared(model).causal
    for folder in ("causal", "older"):
        output = generate(model, texts, f"jetflow:{tmp_path / folder}", max_new_tokens=24)
        assert output.new_tokens == expected
    store(tmp_path / "both", random_drafter(model), dflash_config=own | {"causal_head": False})
    with pytest.raises(ValueError, match="causal: True was given, the drafter's folder says False"):
        JetFlow(tmp_path / "both").prepared(model)


def test_a_folder_of_speculators_holds_the_drafter(tmp_path):
    model, texts, expected = known("qwen3", (9,), 24, vocabulary=V)
    drafter = random_drafter(model)
    store_speculators(tmp_path, drafter, model)
    loaded = DFlashDrafter.from_pretrained(tmp_path)
    assert (loaded.config.feature_layers, loaded.config.target) == ([1, 2], "tiny")
    assert (loaded.config.block_size, loaded.config.mask_token_id) == (SIZE, V - 1)
    assert loaded.config.causal is False
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name
    output = generate(model, texts, f"dflash:{tmp_path}", max_new_tokens=24)
    assert output.new_tokens == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"speculators_model_type": "jetspec"},
            "speculators' 'jetspec', whose blocks read the tok",
        ),
        ({"speculators_model_type": "dspark"}, "speculators' 'dspark', not a DFlash drafter"),
        (
            {"draft_vocab_size": 4},
            "must be transformer_layer_config.vocab_size, 6, got 4",
        ),
        ({"target_hidden_size": 64}, "must be transformer_layer_config.hidden_size, 32, got 64"),
        ({"sample_from_anchor": True}, "sample_from_anchor must be False, got True"),
        ({"projector_type": "domino"}, "projector_type must be 'dflash', got 'domino'"),
        ({"aux_hidden_state_layer_ids": [0, 1]}, "must be a list of integers from 1 on, got"),
        ({"mask_token_id": None}, "mask_token_id is needed, an integer from 0 on, got null"),
        ({"mask_token_id": 6}, "mask_token_id must be below vocab_size, 6, got 6"),
    ],
    ids=str,
)
def test_what_is_not_computed_of_speculators_is_refused(tmp_path, changes, message):
    model = tiny_model("qwen3", vocab_size=V)
    store_speculators(tmp_path, random_drafter(model), model, **changes)
    with pytest.raises(ValueError, match=message):
        DFlashDrafter.from_pretrained(tmp_path)


def store_speculators(folder, drafter, model, **changes):
    """Store a drafter as speculators does, with copies of the target's weights."""
    config, size = drafter.config, drafter.config.vocab_size
    given = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "tiny"}},
        "transformer_layer_config": layer_of(config),
        "draft_vocab_size": size,
        "block_size": SIZE,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": config.feature_layers,
        "sample_from_anchor": False,
    }
    weights = {n: x.detach().clone() for n, x in drafter.state_dict().items()}
    weights |= {f"{n}.weight": model.lm_head.weight.detach().clone() for n in COPIES}
    weights |= {"d2t": torch.zeros(size, dtype=torch.int64), "t2d": torch.ones(size).bool()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(given | changes))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


OWN = {"mask_token_id": V - 1, "target_layer_ids": [0, 1]}
COPIES = "embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"


def layer_of(config):
    """Return what folders say of a drafter's layers."""
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters",
    )  # fmt: skip
    given = {name: getattr(config, name) for name in names}
    return given | {"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": False}


def store(folder, drafter, **changes):
    """Store a drafter as its authors do."""
    given = layer_of(drafter.config)
    given |= {"architectures": ["DFlashDraftModel"], "block_size": SIZE, "num_target_layers": 3}
    given["dflash_config"] = OWN
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(given | changes))
    save_file(drafter.state_dict(), folder / "model.safetensors", {"format": "pt"})


def test_folders_of_the_authors_and_of_our_own(tmp_path):
    model, texts, expected = known("qwen3", (9,), 24, vocabulary=V)
    drafter = random_drafter(model)
    store(tmp_path / "theirs", drafter)
    drafter.save_pretrained(tmp_path / "ours")
    for folder in ("theirs", "ours"):
        loaded = DFlashDrafter.from_pretrained(tmp_path / folder)
        assert loaded.config.feature_layers == [1, 2]
        assert (loaded.config.block_size, loaded.config.mask_token_id) == (SIZE, V - 1)
        for name, weight in drafter.state_dict().items():
            assert torch.equal(weight, loaded.state_dict()[name]), name
        output = generate(model, texts, f"dflash:{tmp_path / folder}", max_new_tokens=24)
        assert output.new_tokens == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "a model of 'LlamaForCausalLM', not a DFlash"),
        ({"dflash_config": {"conv_kernel_size": 4}}, "conv_kernel_size 4 is not served"),
        ({"layer_types": ["sliding_attention"] * 2}, "needs sliding_window, a positive integer"),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
            "layers of sliding_attention are not served",
        ),
        (
            {"dflash_config": OWN | {"causal_head": True, "causal": False}},
            "dflash_config.causal_head is True and dflash_config.causal False, which must",
        ),
        (
            {"dflash_config": OWN | {"target_hidden_size": 64}},
            "dflash_config.target_hidden_size must be hidden_size, 32, got 64",
        ),
        ({"block_size": 65}, "block_size must be from 2 to 64, got 65"),
        ({"dflash_config": {"mask_token_id": 1}}, r"config.target_layer_ids is needed, a list"),
        ({"num_hidden_layers": 1}, "unexpected keys layers.1"),
        ({"intermediate_size": 8}, r"down_proj.weight is \[32, 48\], expected \[32, 8\]"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 3]}},
            "deepest layer is 4, the target's is 3$",
        ),
        ({"vocab_size": 9}, "its vocab_size is 9, the target's is 6$"),
        ({"num_target_layers": 36}, "its num_target_layers is 36, the target's is 3$"),
        ({"architectures": ["DFlash2DraftModel"]}, "a model of 'DFlash2DraftModel', not a DFlash"),
        ({"dflash_config": OWN | {"mask_token_id": 6}}, "must be below vocab_size, 6, got 6"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, changes, message):
    """By both numbers, or by the name of what is not read."""
    model = tiny_model("qwen3", vocab_size=V)
    store(tmp_path / "dflash", random_drafter(model), **changes)
    with pytest.raises(ValueError, match=message):
        generate(model, [[1, 2, 3]], DFlash(tmp_path / "dflash"), max_new_tokens=4)


def test_a_head_of_another_width_is_refused(tmp_path):
    store(tmp_path, random_drafter(tiny_model("qwen3", vocab_size=V, hidden_size=64)))
    with pytest.raises(ValueError, match="its hidden_size is 64, the target's is 32$"):
        JetFlow(tmp_path).prepared(tiny_model("qwen3", vocab_size=V))

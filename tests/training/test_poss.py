"""PosS' objective: a step against a plain loop, where drafters start, and the cache of features."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specattn.blocks import TORCH
from specattn.drafters import PosSDrafter
from specattn.drafters.poss import fuse, keys_and_values, specialist
from specattn.training import VARIANTS, FeatureCache, PosSObjective
from specattn.training.features import features_of
from specattn.training.loss import IGNORED
from specattn.training.poss import _around_norm, start_from_drafter, start_from_target
from tests.decoding.models import VOCABULARY, tiny_model
from tests.drafters.poss_statement import BOTH_NORMS, random_drafter

ROWS, LENGTH = 2, 11
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gpt_oss")


def batch(rows=ROWS, length=LENGTH, seed=4):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:].clone()


def target_and_drafter(family="qwen3", **options):
    target = tiny_model(family, peak=1.0).double()
    return target, random_drafter(target, **options)


def plain_loss(objective, ids, labels):
    """Return the loss as the paper states it: one root at a time, all of its text read anew."""
    target, drafter = objective.target, objective.drafter
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    total, items = 0.0, (labels != IGNORED).sum()
    for row, row_labels in zip(ids, labels, strict=True):
        features = target.model(row[None]).last_hidden_state[0]
        for root in range(1, len(row)):
            pairs = [pair(drafter, embed(row[t + 1]), features[t]) for t in range(root)]
            for depth in range(min(objective.depth, len(row) - root)):
                layer = min(depth // drafter.config.positions_per_layer, drafter.config.layers - 1)
                out = last_of_layer(drafter, layer, pairs)
                aim = root + depth
                if row_labels[aim] != IGNORED:
                    total += objective.feature_weight * F.smooth_l1_loss(out, features[aim])
                    distribution = head(features[aim]).softmax(-1)
                    total += objective.token_weight * F.cross_entropy(head(out), distribution)
                if aim + 1 < len(row):
                    pairs.append(pair(drafter, embed(row[aim + 1]), out.detach()))
    return total / (objective.depth * items)


def pair(drafter, embedding, feature):
    """Return fc of a pair."""
    config = drafter.config
    if config.fc_norm:
        size = (feature.square().mean() + config.rms_norm_eps).sqrt()
        feature = feature / size * drafter.fc_norm.weight
    return drafter.fc(torch.cat([embedding, feature]))


def last_of_layer(drafter, layer, pairs):
    """Return a specialist's output for the last of the pairs, with torch's own causal attention."""
    x = torch.stack(pairs)[None]
    place = drafter.rotated(x, torch.arange(len(pairs))[None])
    k, v = keys_and_values(TORCH, drafter, layer, x, place)

    def attend(q):
        q, keys, values = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    return specialist(TORCH, drafter, layer, x, place, attend)[0, -1]


@pytest.mark.parametrize("norms", [{}, BOTH_NORMS], ids=["plain", "norms"])
@pytest.mark.parametrize(("layers", "positions_per_layer"), [(1, 1), (4, 1), (2, 2)])
def test_a_step_is_the_plain_loop(layers, positions_per_layer, norms):
    target, drafter = target_and_drafter(
        layers=layers, positions_per_layer=positions_per_layer, **norms
    )
    objective = PosSObjective(target, drafter, depth=4, feature_weight=0.7, token_weight=0.3)
    ids, labels = batch()
    labels[0, 3:5] = IGNORED
    expected = plain_loss(objective, ids, labels)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    found = objective(ids, labels)
    found["loss"].backward()
    torch.testing.assert_close(found["loss"], expected, rtol=1e-10, atol=1e-10)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-8, atol=1e-10)
    weighted = 0.7 * found["feature_loss"] + 0.3 * found["token_loss"]
    torch.testing.assert_close(weighted, found["loss"])


def test_a_step_of_several_passes_is_divided_by_all_its_labels():
    target, drafter = target_and_drafter()
    objective = PosSObjective(target, drafter, depth=2)
    ids, labels = batch(4)
    together = objective(ids, labels)["loss"]
    halves = [objective(ids[n : n + 2], labels[n : n + 2], labels.numel()) for n in (0, 2)]
    torch.testing.assert_close(sum(half["loss"] for half in halves), together)


def test_only_the_drafter_learns():
    target, drafter = target_and_drafter()
    objective = PosSObjective(target, drafter, depth=3).train()
    assert not target.training
    objective(*batch())["loss"].backward()
    assert all(p.grad is None for p in target.parameters())
    assert all(p.grad is not None for p in drafter.parameters())
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        PosSObjective(target, drafter, depth=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_drafter_starts_as_the_last_layer(family):
    target = tiny_model(family)
    drafter = PosSDrafter.for_target(target, target="toy", layers=2).double()
    rows, _ = batch(6, 24)
    start_from_target(drafter, target, rows)

    # fc: no other linear map foretells the next feature better (but for the ridge).
    passes = [_around_norm(target, row[None]) for row in rows]
    features, before_norm = (torch.cat(part) for part in zip(*passes, strict=True))
    embeds = target.get_input_embeddings()(rows).double()
    pairs = torch.cat([embeds[:, 1:], features[:, :-1]], -1)
    weight = nn.Parameter(drafter.fc.weight.detach().clone())
    error = ((pairs @ weight.T - features[:, 1:]) ** 2).sum()
    (slope,) = torch.autograd.grad(error, weight)
    strength = 1e-3 * pairs.square().sum((0, 1)).mean()
    torch.testing.assert_close(slope, -2 * strength * weight.detach(), rtol=1e-6, atol=1e-8)

    # The layers: the last one's own, its output scaled as the final norm scales features.
    scale = (features.norm() / before_norm.norm()).float()
    layer, x = target.base_model.layers[-1], torch.randn(1, 5, 32)
    for drafted in drafter.float().specialists:
        own, theirs = drafted.attention, layer.self_attn
        for mine, linears in (
            (own.q_proj, [theirs.q_proj]), (own.kv_proj, [theirs.k_proj, theirs.v_proj]),
        ):  # fmt: skip
            torch.testing.assert_close(mine(x), torch.cat([f(x) for f in linears], -1))
        bias = 0 if theirs.o_proj.bias is None else theirs.o_proj.bias
        y = torch.randn(1, 5, theirs.o_proj.in_features)
        torch.testing.assert_close(own.o_proj(y), scale * (theirs.o_proj(y) - bias))
        if hasattr(layer.mlp, "gate_proj"):
            gate, up = drafted.gate_up_proj(drafted.norm(x)).chunk(2, -1)
            mine = drafted.down_proj(F.silu(gate) * up)
            expected = layer.mlp(layer.post_attention_layernorm(x))
            torch.testing.assert_close(mine, scale * expected)


def test_a_new_drafters_norms_leave_features_as_large_as_they_are():
    """On average; and fc is the best linear map of what the first of them leaves."""
    target = tiny_model("llama")
    drafter = PosSDrafter.for_target(target, target="toy", layers=2, **BOTH_NORMS).double()
    rows, _ = batch(6, 24)
    start_from_target(drafter, target, rows)
    features = features_of(target, rows).double()
    for norm in (drafter.fc_norm, *(s.output_norm for s in drafter.specialists)):
        sizes = norm(features).square().mean(-1)
        average = features.square().mean().expand_as(sizes)
        torch.testing.assert_close(sizes, average, rtol=1e-5, atol=0)  # but for the norms' epsilon
    embeds = target.get_input_embeddings()(rows).double()
    unit = features / (features.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    pairs = torch.cat([embeds[:, 1:], unit[:, :-1]], -1).flatten(0, 1)
    square = pairs.T @ pairs
    square += 1e-3 * square.diagonal().mean() * torch.eye(len(square))
    best = torch.linalg.solve(square, pairs.T @ features[:, 1:].flatten(0, 1))
    with torch.no_grad():
        found = fuse(TORCH, drafter, embeds[:, 1:], features[:, :-1]).flatten(0, 1)
    torch.testing.assert_close(found, pairs @ best, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("norms", [{}, BOTH_NORMS], ids=["plain", "norms"])
def test_poss_starts_from_eagle(norms):
    target, eagle = target_and_drafter(layers=1, **norms)
    drafter = PosSDrafter.for_target(
        target, target="toy", layers=3, positions_per_layer=2, **norms
    ).double()
    start_from_drafter(drafter, eagle)
    ids, labels = batch()
    losses = [PosSObjective(target, d, depth=4)(ids, labels)["loss"] for d in (eagle, drafter)]
    torch.testing.assert_close(*losses)
    for name in BOTH_NORMS:
        other = PosSDrafter.for_target(target, target="toy", **norms | {name: not norms})
        with pytest.raises(ValueError, match=f"{name} {bool(norms)}, expected {not norms} as in"):
            start_from_drafter(other, eagle)
    other = PosSDrafter.for_target(tiny_model("qwen3", head_dim=32), target="toy", **norms)
    with pytest.raises(ValueError, match="the drafter to start from has other layers"):
        start_from_drafter(other, eagle)


def test_the_variants_are_the_papers():
    """Appendix D.2: 1 layer, or one for every 1, 2 or 3 of six positions."""
    assert {name: (v.layers, v.depth) for name, v in VARIANTS.items()} == {
        "eagle-2": (1, 1), "hass": (1, 6), "poss-1": (6, 6), "poss-2": (3, 6), "poss-3": (2, 6)
    }  # fmt: skip


def test_kept_features_are_the_targets_and_are_computed_once(tmp_path):
    target = tiny_model("qwen3", peak=1.0)
    ids, labels = batch(4)
    expected = features_of(target, ids)
    cache = FeatureCache(tmp_path, target)
    assert torch.equal(cache(target, ids[:2]), features_of(target, ids[:2]))
    torch.testing.assert_close(cache(target, ids), expected)  # two of four were there

    # Another run, other order, no more passes of the target.
    target.base_model.forward = None
    again = FeatureCache(tmp_path, target)
    torch.testing.assert_close(again(target, ids.flip(0)), expected.flip(0))


def test_a_killed_run_leaves_no_half_file(tmp_path, monkeypatch):
    target = tiny_model("qwen3", peak=1.0)
    ids, _ = batch(3)
    cache = FeatureCache(tmp_path, target)
    whole, written = cache._path(ids[0]), []

    def killed(tensors, path):
        path.write_bytes(b"half of a fi")
        written.append(path)
        if len(written) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("specattn.training.features.save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        cache(target, ids)
    assert not whole.exists()
    monkeypatch.undo()
    torch.testing.assert_close(
        FeatureCache(tmp_path, target)(target, ids), features_of(target, ids)
    )


def test_features_of_another_target_are_refused(tmp_path):
    FeatureCache(tmp_path / "a", tiny_model("qwen3"))
    with pytest.raises(ValueError, match="features of another target"):
        FeatureCache(tmp_path / "a", tiny_model("qwen3", seed=1))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        FeatureCache(tmp_path / "b", tiny_model("qwen3"))


def test_training_from_disk_is_training_on_the_fly(tmp_path):
    target, drafter = target_and_drafter()
    ids, labels = batch()
    fly = PosSObjective(target, drafter, depth=3)(ids, labels)["loss"]
    cache = FeatureCache(tmp_path, target)
    for _ in range(2):
        kept = PosSObjective(target, drafter, depth=3, feature_cache=cache)(ids, labels)["loss"]
        torch.testing.assert_close(kept, fly)

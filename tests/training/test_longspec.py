"""LongSpec's objective: what the drafter reads, what it is asked, and both tricks of training."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare

from specattn.blocks import TORCH, rotate
from specattn.drafters import LongSpecDrafter
from specattn.drafters.longspec import block, self_heads
from specattn.drafters.training_attention import shifted_attention
from specattn.training import STAGES, LongSpecObjective
from specattn.training.longspec import start_from_target
from specattn.training.loss import IGNORED
from specattn.training.target import last_layer_cache
from tests.decoding.models import CONFIGS, VOCABULARY, tiny_model

ROWS, LENGTH = 2, 24
# gpt-oss keeps a learned sink and a sliding window; it shares no layer code with the others.
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "gpt_oss")


def batch(rows=ROWS, length=LENGTH):
    ids = torch.randint(VOCABULARY, (rows, length + 1))
    return ids[:, :-1], ids[:, 1:].clone()


def objective(family="qwen3", **options):
    target = tiny_model(family, peak=1.0)
    drafter = LongSpecDrafter.for_target(target, target="toy", window=8)
    return LongSpecObjective(target, drafter, **options)


class Recorder(torch.nn.Module):
    """Stands in for a drafter and keeps what it is given."""

    def __init__(self, drafter):
        super().__init__()
        self.drafter, self.calls, self.dtype = drafter, [], drafter.dtype

    def forward(self, *inputs, shift):
        self.calls.append((*inputs, shift))
        return self.drafter(*inputs, shift=shift)


def algorithm_2(q, k, v, j):
    """LongSpec v2, Algorithm 2, lines 5 to 10, for one head: [L, D]."""
    q, k, v = q[j:], k[: len(k) - j], v[: len(v) - j]
    outputs = []
    for i in range(len(q)):
        weights = torch.softmax(q[i] @ k[: i + 1].T / math.sqrt(q.shape[1]), 0)
        outputs.append(weights @ v[: i + 1])
    return torch.cat([torch.zeros(j, v.shape[1], dtype=v.dtype), torch.stack(outputs)])


@pytest.mark.parametrize("shift", range(1, 5))
def test_flash_noisy_training_is_algorithm_2(shift):
    q, k, v = (torch.randn(1, LENGTH, 1, 16, dtype=torch.float64) for _ in range(3))
    actual = shifted_attention(q, k, v, shift)[0, :, 0]
    torch.testing.assert_close(actual, algorithm_2(q[0, :, 0], k[0, :, 0], v[0, :, 0], shift))


def test_every_shift_below_gamma_is_equally_likely():
    noisy = objective(levels=5)
    noisy.drafter = Recorder(noisy.drafter)
    noisy.train()
    with torch.no_grad():
        for _ in range(400):
            noisy(*batch(1, 8))
    counts = torch.bincount(torch.tensor([call[-1] for call in noisy.drafter.calls]))
    assert counts[0] == 0
    assert len(counts) == 5
    assert chisquare(counts[1:].tolist()).pvalue > 1e-3


@pytest.mark.parametrize(("levels", "shifts"), [(5, [1, 2, 3, 4]), (2, [1]), (1, [0])])
def test_evaluation_takes_the_mean_over_all_shifts(levels, shifts):
    noisy = objective(levels=levels)
    noisy.drafter = Recorder(noisy.drafter)
    ids, labels = batch()
    labels[0, :5] = IGNORED
    actual = noisy.eval()(ids, labels)["loss"]
    assert [call[-1] for call in noisy.drafter.calls] == shifts
    head = noisy.target.lm_head.weight
    expected = [
        F.cross_entropy(
            (noisy.drafter.drafter(*x, shift=j) @ head.T).flatten(0, 1), labels.flatten()
        )
        for *x, j in noisy.drafter.calls
    ]
    torch.testing.assert_close(actual, torch.stack(expected).mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafter_reads_the_cache_of_the_last_layer(family):
    model = tiny_model(family)
    ids, _ = batch()
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    keys, values = last_layer_cache(model, ids, positions)
    # transformers' own cache, filled one token after the other; it keeps a window where one slides.
    cache = None
    for step in range(LENGTH):
        cache = model(ids[:, step : step + 1], past_key_values=cache, use_cache=True)
        cache = cache.past_key_values
    theirs = cache.layers[-1]
    kept = theirs.keys.shape[2]
    assert keys.shape == (ROWS, LENGTH, model.config.num_key_value_heads, model.config.head_dim)
    for mine, own in ((keys, theirs.keys), (values, theirs.values)):
        torch.testing.assert_close(mine[:, -kept:], own.transpose(1, 2), rtol=1e-4, atol=1e-4)


def test_a_jump_of_the_positions_is_no_new_text():
    """transformers takes one for the start of another text unless a cache is at hand."""
    model = tiny_model("llama")
    ids, _ = batch()
    positions = torch.arange(LENGTH).expand(ROWS, -1).clone()
    positions[:, 4:] += 300
    _, values = last_layer_cache(model, ids, positions)
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % VOCABULARY
    _, after = last_layer_cache(model, changed, positions)
    assert (values[:, 4:] - after[:, 4:]).abs().amax((0, 2, 3)).min() > 1e-6


def test_positions_are_anchor_offset_in_training_alone():
    noisy = objective(anchor_offset=True)
    noisy.drafter = Recorder(noisy.drafter)
    noisy.train()(*batch())
    noisy.eval()(*batch())
    training, evaluation = noisy.drafter.calls[0][1], noisy.drafter.calls[1][1]
    assert (training[:, :4] == torch.arange(4)).all()
    assert training[0, 4] != training[1, 4]
    assert (evaluation == torch.arange(LENGTH)).all()


def test_only_the_drafter_learns():
    noisy = objective().train()
    assert not noisy.target.training
    noisy(*batch())["loss"].backward()
    assert all(p.grad is None for p in noisy.target.parameters())
    assert all(p.grad is not None for p in noisy.drafter.parameters())


def test_a_step_of_several_passes_is_divided_by_all_its_labels():
    noisy = objective(levels=2).eval()
    ids, labels = batch(4)
    together = noisy(ids, labels)["loss"]
    halves = [noisy(ids[n : n + 2], labels[n : n + 2], labels.numel())["loss"] for n in (0, 2)]
    torch.testing.assert_close(sum(halves), together)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_drafter_starts_with_the_layers_of_the_target(family):
    target = tiny_model(family)
    drafter = LongSpecDrafter.for_target(target, target="toy")
    start_from_target(drafter, target)
    ids, _ = batch(1, 6)
    x, positions = target.get_input_embeddings()(ids), torch.arange(6)[None]
    place = drafter.rotated(x, positions)

    # The first layer reads embeddings too, so it caches what the drafter's self attention does.
    first_layer = target(ids, use_cache=True).past_key_values.layers[0]
    own = self_heads(TORCH, drafter, x, place)[1:]
    for mine, theirs in zip(own, (first_layer.keys, first_layer.values), strict=True):
        torch.testing.assert_close(mine, theirs.transpose(1, 2))

    last = target.model.layers[-1]
    normed = last.input_layernorm(x)
    theirs = last.self_attn.q_proj(normed).unflatten(-1, (-1, last.self_attn.head_dim))
    if hasattr(last.self_attn, "q_norm"):
        theirs = last.self_attn.q_norm(theirs)
    found = []

    def attend(*heads):
        return torch.zeros_like(heads[0])

    def attend_to_target(q):
        found.append(q)
        return torch.zeros_like(q)

    block(TORCH, drafter, x, place, attend, attend_to_target)
    torch.testing.assert_close(found[0], rotate(theirs, *place))

    if not hasattr(last.mlp, "gate_proj"):  # a mixture of experts
        return
    gate, up = drafter.gate_up_proj(drafter.mlp_norm(x)).chunk(2, -1)
    mine = drafter.down_proj(F.silu(gate) * up)
    torch.testing.assert_close(mine, last.mlp(last.post_attention_layernorm(x)))


def test_the_stages_are_the_papers():
    """LongSpec v2, §4.1 and appendix D."""
    assert [*STAGES] == ["short", "long", "finetune"]
    assert [stage.batch_size for stage in STAGES.values()] == [2048, 256, 256]
    assert [stage.learning_rate for stage in STAGES.values()] == [5e-4, 5e-6, 5e-6]
    assert [stage.anchor_offset for stage in STAGES.values()] == [True, False, False]


def test_what_does_not_fit_is_refused():
    target = tiny_model("qwen3")
    other = LongSpecDrafter.for_target(tiny_model("qwen3", head_dim=32), target="other")
    with pytest.raises(ValueError, match="does not fit the target"):
        LongSpecObjective(target, other)
    with pytest.raises(ValueError, match="levels must be at least 1, got 0"):
        objective(levels=0)


def test_all_families_are_covered():
    assert {name.split("-")[0] for name in CONFIGS} == set(FAMILIES)

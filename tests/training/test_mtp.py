"""Training of an MTP head: a step against transformers' own model of one, and where it starts."""

import pytest
import torch
import torch.nn.functional as F

from specattn.drafters import MtpDrafter
from specattn.training import MtpObjective
from specattn.training.features import features_of
from specattn.training.loss import IGNORED
from specattn.training.mtp import DECAY, _around_last_layer, draft_texts, start_from_target
from tests.decoding.models import VOCABULARY, tiny_model
from tests.decoding.mtp_folders import as_transformers, random_drafter

LENGTH, DEPTH = 8, 3


def rows(seed=4):
    """Return two rows of text, their labels, one of which counts for nothing."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, 5] = IGNORED
    return ids[:, :-1], labels


def stated(mtp, ids, features, root):
    """Return what is drafted behind a root along its text, one pair after the other."""
    known, outs = features[:root], []
    for end in range(root, min(root + DEPTH, LENGTH)):
        tokens = ids[None, 1 : end + 1]
        places = torch.arange(1, end + 1)[None]
        drafted = mtp.forward_layer(0, known[None], places, None, input_ids=tokens)[0, -1:]
        known, outs = torch.cat([known, drafted]), [*outs, drafted[0]]
    return outs


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_drafts_along_texts_are_transformers(family):
    target = tiny_model(family, peak=1.0).double()
    drafter, (ids, _) = random_drafter(target, dtype=torch.float64), rows()
    mtp, features = as_transformers(target, drafter), features_of(target, ids)
    with torch.no_grad():
        outs = draft_texts(drafter, target.get_input_embeddings()(ids), features, DEPTH)
        for row in range(len(ids)):
            for root in range(1, LENGTH):
                for depth, expected in enumerate(stated(mtp, ids[row], features[row], root)):
                    found = outs[depth][row, root - 1]
                    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_the_loss_is_the_plain_one_and_every_weight_learns():
    target = tiny_model("qwen3", peak=1.0).double()
    drafter, (ids, labels) = random_drafter(target, dtype=torch.float64), rows()
    losses = MtpObjective(target, drafter, depth=DEPTH)(ids, labels)
    features, head = features_of(target, ids), target.lm_head
    outs = draft_texts(drafter, target.get_input_embeddings()(ids), features, DEPTH)
    total = 0.0
    for depth, out in enumerate(outs):
        step, counted = 0.0, 0
        for row, at in ((row, at) for row in range(2) for at in range(depth + 1, LENGTH)):
            if labels[row, at] != IGNORED:
                wanted = head(features[row, at]).softmax(-1)
                step = step + F.cross_entropy(head(out[row, at - depth - 1]), wanted)
                counted += 1
        torch.testing.assert_close(losses[f"token_loss_{depth + 1}"], step / counted)
        total = total + DECAY**depth * step
    weights = sum(DECAY**depth for depth in range(DEPTH))
    torch.testing.assert_close(losses["loss"], total / (weights * (labels != IGNORED).sum()))
    losses["loss"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
    assert all(p.grad is None for p in target.parameters())


def test_a_later_step_teaches_the_earlier_ones():
    """Its loss alone reaches what the first step made."""
    target = tiny_model("llama", peak=1.0).double()
    drafter, (ids, _) = random_drafter(target, dtype=torch.float64), rows()
    features = features_of(target, ids).clone().requires_grad_()
    embeds = target.get_input_embeddings()(ids).detach()
    first, second = draft_texts(drafter, embeds, features, 2)
    slope = torch.autograd.grad(second.pow(3).sum(), first, retain_graph=True)[0]
    assert slope.abs().sum() > 0


def test_later_text_is_invisible():
    target = tiny_model("qwen3", peak=1.0).double()
    drafter, (ids, _) = random_drafter(target, dtype=torch.float64), rows()
    embeds, features = target.get_input_embeddings()(ids), features_of(target, ids)
    with torch.no_grad():
        before = draft_texts(drafter, embeds, features, DEPTH)
        embeds[:, 4:] += 1.0
        features[:, 4:] *= -1.0
        after = draft_texts(drafter, embeds, features, DEPTH)
    for depth, (x, y) in enumerate(zip(before, after, strict=True)):
        kept = 3 - depth  # roots whose whole path lies before the change
        assert torch.equal(x[:, :kept], y[:, :kept])
        assert not torch.equal(x[:, kept], y[:, kept])


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_new_head_is_the_last_layer_behind_a_least_squares_map(family):
    target = tiny_model(family, peak=1.0)
    drafter = MtpDrafter.for_target(target, target="tiny")
    texts = torch.randint(VOCABULARY, (8, 40), generator=torch.Generator().manual_seed(3))
    start_from_target(drafter, target, texts)
    assert torch.equal(
        drafter.self_attn.o_proj.weight, target.model.layers[-1].self_attn.o_proj.weight
    )
    assert torch.equal(drafter.shared_head["norm"].weight, target.model.norm.weight)

    def missed(weight):
        total = 0.0
        for row in texts:
            features, before = _around_last_layer(target, row[None])
            embeds = target.get_input_embeddings()(row[None]).double()
            parts = [F.rms_norm(x, x.shape[-1:]) for x in (embeds[0, 1:], features[0, :-1])]
            total += (torch.cat(parts, -1) @ weight.double().T - before[0, 1:]).square().sum()
        return float(total)

    with torch.no_grad():
        found, generator = missed(drafter.eh_proj.weight), torch.Generator().manual_seed(0)
        for _ in range(3):
            noise = torch.randn(drafter.eh_proj.weight.shape, generator=generator)
            assert missed(drafter.eh_proj.weight + 0.05 * noise) > found


def test_what_does_not_fit_is_refused():
    target = tiny_model("llama")
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        MtpObjective(target, random_drafter(target), depth=0)
    x = torch.zeros(1, 5, 32)
    with pytest.raises(ValueError, match="depth: expected 1 to 4 for 5 tokens, got 5"):
        draft_texts(random_drafter(target), x, x, 5)
    with pytest.raises(ValueError, match="features: expected shape"):
        draft_texts(random_drafter(target), x, x[:, 1:], 1)

"""The chunked loss against torch's own, and the memory that it is there to save."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specattn.training import loss
from specattn.training.loss import (
    IGNORED,
    chunked_cross_entropy,
    liger_cross_entropy,
    linear_cross_entropy,
    soft_cross_entropy,
)

TOKENS, WIDTH, VOCABULARY = 23, 16, 50


def inputs(dtype):
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype)
    labels = torch.randint(VOCABULARY, (TOKENS,))
    labels[::5] = IGNORED
    return hidden, weight, labels


def loss_and_gradient(total, hidden):
    hidden.grad = None
    weights = 3 + torch.arange(total.numel()).view_as(
        total
    )  # rows of their own, where there are any
    (weights * total).sum().backward()
    return total.detach(), hidden.grad.clone()


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 1000])
def test_agrees_with_torch_in_float64(chunk):
    hidden, weight, labels = inputs(torch.float64)
    expected = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED, reduction="sum")
    expected = loss_and_gradient(expected, hidden)
    actual = loss_and_gradient(chunked_cross_entropy(hidden, weight, labels, chunk), hidden)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_sixteen_bits_cost_no_more_than_the_products():
    hidden, weight, labels = inputs(torch.float64)
    exact = loss_and_gradient(chunked_cross_entropy(hidden, weight, labels, 7), hidden)
    narrow = hidden.detach().bfloat16().requires_grad_()
    actual = chunked_cross_entropy(narrow, weight.bfloat16(), labels, 7)
    torch_own = F.cross_entropy(
        (narrow @ weight.bfloat16().T).float(), labels, ignore_index=IGNORED, reduction="sum"
    )
    actual, torch_own = (loss_and_gradient(x, narrow) for x in (actual, torch_own))
    assert actual[0].dtype == torch.float32
    for mine, theirs, true in zip(actual, torch_own, exact, strict=True):
        error, allowed = ((x.double() - true).abs().max() for x in (mine, theirs))
        assert error <= 2 * allowed


def test_leading_dimensions_do_not_matter():
    hidden, weight, labels = inputs(torch.float32)
    flat = linear_cross_entropy(hidden[:20], weight, labels[:20])
    folded = linear_cross_entropy(hidden[:20].view(4, 5, -1), weight, labels[:20].view(4, 5))
    torch.testing.assert_close(folded, flat)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = (x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        self.numel = max(self.numel, *sizes, 0)
        return out


def test_logits_of_all_tokens_are_never_held():
    tokens, chunk, vocabulary = 512, 16, 1000
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    weight = torch.randn(vocabulary, WIDTH)
    with Largest() as largest:
        chunked_cross_entropy(hidden, weight, torch.zeros(tokens).long(), chunk).backward()
    assert largest.numel == chunk * vocabulary


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h, w, y: (h, w.requires_grad_(), y), "frozen"),
        (lambda h, w, y: (h[:, 1:], w, y), r"\[23, 15\]"),
        (lambda h, w, y: (h, w, y[1:]), r"\[22\]"),
    ],
)
def test_bad_arguments_are_named(change, reason):
    with pytest.raises(ValueError, match=reason):
        linear_cross_entropy(*change(*inputs(torch.float32)))


def test_liger_agrees_with_the_chunks():
    """On a GPU where there is one, else through Triton's interpreter."""
    pytest.importorskip("liger_kernel")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, weight, labels = (x.detach().to(device) for x in inputs(torch.float32))
    hidden.requires_grad_()
    fused = loss_and_gradient(liger_cross_entropy(hidden, weight, labels), hidden)
    chunked = loss_and_gradient(chunked_cross_entropy(hidden, weight, labels, 7), hidden)
    torch.testing.assert_close(fused, chunked, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_served_by_liger_where_it_is_installed(monkeypatch):
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(loss, "chunked_cross_entropy", None)
    hidden, weight, labels = (x.detach().cuda() for x in inputs(torch.float32))
    assert linear_cross_entropy(hidden, weight, labels).isfinite()


def soft_inputs(dtype, steps=3):
    hidden = torch.randn(steps, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    features = torch.randn(TOKENS, WIDTH, dtype=dtype)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype)
    return hidden, features, weight, torch.rand(steps, TOKENS) < 0.8


def torch_own_soft(hidden, features, weight, counts):
    distribution = (features @ weight.T).softmax(-1).expand(len(hidden), -1, -1)
    losses = F.cross_entropy((hidden @ weight.T).transpose(1, 2), distribution.mT, reduction="none")
    return (losses * counts).sum(1)


@pytest.mark.parametrize("chunk", [1, 7, TOKENS, 1000])
def test_laws_in_place_of_labels_agree_with_torch(chunk, monkeypatch):
    hidden, *rest = soft_inputs(torch.float64)
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", chunk * len(hidden) * VOCABULARY)
    actual = loss_and_gradient(soft_cross_entropy(hidden, *rest), hidden)
    expected = loss_and_gradient(torch_own_soft(hidden, *rest), hidden)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_laws_in_sixteen_bits_cost_no_more_than_the_products():
    hidden, features, weight, counts = soft_inputs(torch.float64)
    exact = loss_and_gradient(soft_cross_entropy(hidden, features, weight, counts), hidden)
    narrow = hidden.detach().bfloat16().requires_grad_()
    features, weight = features.bfloat16(), weight.bfloat16()
    actual = soft_cross_entropy(narrow, features, weight, counts)
    torch_own = torch_own_soft(narrow, features, weight, counts)
    actual, torch_own = (loss_and_gradient(x, narrow) for x in (actual, torch_own))
    assert actual[0].dtype == torch.float32
    for mine, theirs, true in zip(actual, torch_own, exact, strict=True):
        error, allowed = ((x.double() - true).abs().max() for x in (mine, theirs))
        assert error <= 2 * allowed


def test_laws_that_do_not_fit_are_refused():
    hidden, features, weight, counts = soft_inputs(torch.float32)
    with pytest.raises(ValueError, match="expected hidden"):
        soft_cross_entropy(hidden, features[1:], weight, counts)
    with pytest.raises(ValueError, match="frozen"):
        soft_cross_entropy(hidden, features, weight.requires_grad_(), counts)

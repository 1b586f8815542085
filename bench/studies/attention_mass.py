"""Measure the share of the attention that lies on what each method reads while it drafts.

    python bench/studies/attention_mass.py --context 4096,16384 --texts 2

What a method would read is chosen as in decoding, behind a block of verified tokens; then the next
block is verified with the whole cache, and its rows' attention weights are summed over the tokens
that the method would have read. Once on the held-out text itself, once behind what the model wrote
greedily. No draft is run: this explains acceptance, it does not measure it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.records import Record
from common.tables import aligned, size

from specattn.decoding import Quest, SpecExtend, Streaming, Target, TriForce
from specattn.decoding.drafting.sparse_chain import PrefixSelection
from specattn.decoding.engine.snapshot import PromptSnapshot
from specattn.decoding.methods.quest import PageBounds, Pages
from specattn.decoding.methods.specextend import select_chunks
from specattn.decoding.methods.triforce import retrieve
from specattn.decoding.passes.attention import CaptureSpec, KVSelector, Selection
from specattn.ops import select_topk
from specattn.tree import Tree
from studies import study

GAMMA, GREEDY = 6, 96
SHARE = {"gamma": GAMMA, "ratio": 0.07, "min_tokens": 256}
BEST, PAGES, FIRST = "best tokens, all heads alike", "best pages, each KV head", "first 4 tokens"
TEXTS = ("held-out text", "greedy text")


class AttentionMass(study.Study):
    """A cell is a text: each method's shares of the attention, on it and on what is written."""

    defaults = {"context": [4096], "texts": 1}

    @torch.no_grad()
    def measure(self, place: Record) -> Iterator[Record]:
        """Yield the means over layers, rows and heads, by text and method."""
        (model, texts), context, block = self.loaded, place["context"], GAMMA + 1
        (tokens,) = texts.prompts(place["text"], context + 2 * block, 1)
        target = Target(model, 1, context + 1 + GREEDY + 4 * block)
        snapshot = PromptSnapshot(target, [tokens[: context + 1]])
        found = [coverage(target, tokens[None, context:])]
        snapshot.restore()
        root = continued(target, tokens[None, context : context + 1], GREEDY)[:, -1:]
        begun = target.cache.seqlens
        ahead = continued(target, root, 2 * block)
        target.cache.seqlens = begun
        found.append(coverage(target, ahead))
        yield {
            text: {name: sum(shares) / len(shares) for name, shares in one.items()}
            for text, one in zip(TEXTS, found, strict=True)
        }

    def table(self, records: list[Record]) -> str:
        """Return a table per context, means over texts."""
        return "\n\n".join(_table(records, context) for context in self.options.context)


def _table(records: list[Record], context: int) -> str:
    own = [one for one in records if one["context"] == context]
    header = [(f"{size(context)}, 7%: share of the attention on", "<")]
    rows = [
        (name, *(f"{sum(one[text][name] for one in own) / len(own):.0%}" for text in TEXTS))
        for name in own[0][TEXTS[0]]
    ]
    return aligned(header + [(text, ">") for text in TEXTS], rows)


def continued(target: Target, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Return a root [1, 1] and `count` greedy tokens; the cache holds all but the last."""
    root = Tree.chain(0)
    for _ in range(count):
        logits = target.verify(root, tokens[:, -1:]).logits
        target.cache.seqlens = target.cache.seqlens + 1
        tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


def coverage(target: Target, tokens: torch.Tensor) -> dict[str, list[float]]:
    """Return each method's share of the attention, averaged over layers, rows and heads."""
    cache, chain, block = target.cache, Tree.chain(GAMMA), GAMMA + 1
    prefix, layers, first = cache.seqlens, len(target.full_layers), tokens[:, :block]
    rows = tuple(range(block))
    each = CaptureSpec(rows=rows, ranking="weight", per_row=True, queries=True)
    scores, seen = (
        target.verify(chain, first, capture=CaptureSpec(rows=(0, -1))),
        target.verify(chain, first, capture=each),
    )
    cache.seqlens = prefix + block  # the whole block was accepted
    queries = target.verify(chain, tokens[:, block : 2 * block], capture=each).queries
    bounds = PageBounds(target, Quest.page_size)
    bounds.read_all()
    by_weight = seen.scores[:, 0, [0, -1]].mean(1)
    vegas, weighed = (ranked(one, prefix) for one in (scores.scores[:, 0], by_weight))
    extend = select_chunks(SpecExtend(**SHARE), seen.scores[:, :, -1], prefix)
    retrieved = retrieve(TriForce(**SHARE), target, seen.queries[:, :, :1], prefix)
    streaming = Streaming(**SHARE).steps(cache.seqlens, cache.capacity, layers)[0]

    def behind(selected: PrefixSelection) -> Callable[[int], KVSelector]:
        return selected.steps(cache.seqlens, 1, 4 * block + 32)[0].extended

    methods: dict[str, Callable[[int], KVSelector]] = {
        "streaming": streaming.extended,
        "quest": lambda step: Pages(Quest(**SHARE), bounds, step),
        "specextend": behind(extend),
        "triforce": behind(retrieved),
        "vegas": behind(vegas),
        "vegas, ranking=weight": behind(weighed),
    }
    found: dict[str, list[float]] = {name: [] for name in [*methods, BEST, PAGES, FIRST]}
    for layer in range(layers):
        k = cache.layer(layer)[0][0].double()
        for step in rows[:GAMMA]:
            end = int(cache.seqlens) + step
            weights = attention(queries[layer, 0, step].double(), k[: end + 1])  # [Hk, g, end + 1]
            for name, selector in methods.items():
                indices, lengths = selector(step).select(layer, queries[layer, :, step : step + 1])
                found[name].append(covered(weights, indices[0], lengths[0]))
            count = int(vegas.selection.lengths[0]) + block + step + 1
            most = weights.mean((0, 1)).topk(min(count, end + 1)).indices
            found[BEST].append(float(weights[..., most].sum(-1).mean()))
            found[PAGES].append(best_pages(weights, count))
            found[FIRST].append(float(weights[..., :4].sum(-1).mean()))
    return found


def ranked(scores: torch.Tensor, prefix: torch.Tensor) -> PrefixSelection:
    """Choose the best tokens of one request by `scores` [layers, N]."""
    best, counts = select_topk(scores, prefix.repeat(len(scores)), ratio=0.07, min_tokens=256)
    return PrefixSelection(Selection(best[:, None], counts[:1]), prefix)


def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the weights [Hk, g, n] of one row q [Hq, D] over k [n, Hk, D]."""
    q = q.unflatten(0, (k.shape[1], -1))
    return (torch.einsum("hgd,nhd->hgn", q, k) * q.shape[-1] ** -0.5).softmax(-1)


def covered(weights: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor) -> float:
    """Return the mean share of `weights` on what is read: these positions, and the row itself."""
    heads = range(len(weights))
    if indices.dim() == 1:
        indices, lengths = indices.expand(len(weights), -1), lengths.expand(len(weights))
    read = [weights[h][:, indices[h, : lengths[h]].long()].sum(-1).mean() for h in heads]
    return float(sum(read) / len(read) + weights[..., -1].mean())


def best_pages(weights: torch.Tensor, count: int) -> float:
    """Return what the best pages of about `count` tokens and the tokens behind them hold."""
    page = Quest.page_size
    whole = weights.shape[-1] // page
    pages = weights[..., : whole * page].unflatten(-1, (whole, page)).sum(-1).mean(1)  # [Hk, pages]
    best = pages.topk(min(-(-count // page), whole)).values.sum(-1).mean()
    return float(best + weights[..., whole * page :].sum(-1).mean())


main = partial(study.run, AttentionMass)
if __name__ == "__main__":
    sys.exit(main())

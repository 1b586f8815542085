"""specattn under one's own engine: a paged KV cache, a ragged batch, a drafted tree per round.

What the engine hands to `specattn.hybrid_tree_attention` for each layer::

    q                 [B, T, Hq, D]               the tree's T nodes, first the last emitted token
    k_pages, v_pages  [pages, page_size, Hk, D]   the layer's pool, shared by all requests
    cache_seqlens     [B] int32                   cached tokens of each request, all before the tree
    k_tree, v_tree    [B, T, Hk, D]               of the nodes themselves, not in the cache yet
    tree.packed_mask  [T, ceil(T / 64)] int64     which nodes each node sees: its ancestors
    block_table       [B, max_pages] int32        pages of each request, in order
"""

import torch
import torch.nn.functional as F

import specattn

VOCABULARY, WIDTH, Q_HEADS, KV_HEADS, HEAD_DIM, MAX_TOKENS = 50, 32, 4, 2, 16, 128
PAGE_SIZE, PAGES = 16, MAX_TOKENS // 16


class ToyTarget:
    """Embedding, one attention layer, head, all with random weights."""

    def __init__(self):
        self.embedding, self.head = torch.randn(2, VOCABULARY, WIDTH)
        self.positions = torch.randn(MAX_TOKENS, WIDTH)
        self.in_proj = torch.randn(WIDTH, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM) / WIDTH**0.5
        self.out_proj = torch.randn(Q_HEADS * HEAD_DIM, WIDTH) / WIDTH**0.5

    def qkv(self, tokens, positions):
        """Return q, k and v, each [..., heads, D]."""
        x = (self.embedding[tokens] + self.positions[positions]) @ self.in_proj
        return x.unflatten(-1, (-1, HEAD_DIM)).split((Q_HEADS, KV_HEADS, KV_HEADS), dim=-2)

    def logits(self, tokens, out):
        """Return the logits behind each token, given the attention's result."""
        return (self.embedding[tokens] + out.flatten(-2) @ self.out_proj) @ self.head.T

    def dense(self, text):
        """Return the logits of one whole text [L], without specattn."""
        q, k, v = (x.transpose(0, 1) for x in self.qkv(text, torch.arange(len(text))))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.logits(text, out.transpose(0, 1))


class PagedCache:
    """Pools of pages, and which pages belong to which request."""

    def __init__(self, batch):
        self.k_pages, self.v_pages = torch.empty(2, batch * PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.block_table = torch.randperm(batch * PAGES).view(batch, PAGES).int()
        self.seqlens = torch.zeros(batch, dtype=torch.int32)

    def write(self, request, k, v):
        """Commit keys and values [n, Hk, D] behind a request's text."""
        positions = self.seqlens[request] + torch.arange(len(k))
        pages = self.block_table[request, positions // PAGE_SIZE]
        slots = pages * PAGE_SIZE + positions % PAGE_SIZE
        specattn.write_kv(k, v, self.k_pages, self.v_pages, slots)
        self.seqlens[request] += len(k)


def main():
    """Decode two requests by drafted trees, and hold every round to dense attention."""
    torch.manual_seed(0)
    target, cache, tree = ToyTarget(), PagedCache(batch=2), specattn.Tree.full([2, 2])
    prompts = [torch.randint(VOCABULARY, (length,)) for length in (37, 12)]
    for request, prompt in enumerate(prompts):  # the prompt's last token is the first root
        cache.write(request, *target.qkv(prompt[:-1], torch.arange(len(prompt) - 1))[1:])
    texts, error, rounds = list(prompts), 0.0, 8
    successors = (target.embedding @ target.head.T).topk(2).indices  # the draft model
    for _ in range(rounds):
        tokens = torch.stack([text[-1] for text in texts])[:, None].repeat(1, tree.size)
        for node in range(1, tree.size):
            tokens[:, node] = successors[tokens[:, tree.parents[node]], (node - 1) % 2]
        q, k, v = target.qkv(tokens, cache.seqlens[:, None] + tree.depths)
        out, _ = specattn.hybrid_tree_attention(
            q, cache.k_pages, cache.v_pages, cache.seqlens, k, v, tree.packed_mask,
            block_table=cache.block_table)  # fmt: skip
        logits = target.logits(tokens, out)  # greedy below; `acceptance.accept` samples
        accepted = specattn.acceptance.accept_samples(tree, tokens, logits.argmax(-1))
        for request, text in enumerate(texts):
            for node in range(tree.size):
                path = tokens[request, 1:][tree.mask[node, 1:]]  # ancestors come before the node
                expected = target.dense(torch.cat([text, path]))[-1]
                error = max(error, (logits[request, node] - expected).abs().max().item())
            kept = F.pad(accepted.nodes[request, : accepted.counts[request]], (1, 0))  # and root
            cache.write(request, k[request, kept], v[request, kept])
            new = tokens[request, kept[1:]], accepted.next_token[request, None]
            texts[request] = torch.cat([text, *new])

    for prompt, text in zip(prompts, texts, strict=True):
        new, greedy = text[len(prompt) :], target.dense(text[:-1]).argmax(-1)[len(prompt) - 1 :]
        print(f"{len(new)} tokens in {rounds} rounds, plain greedy: {torch.equal(new, greedy)}")
    print(f"largest difference from the logits of dense attention: {error:.1e}")


if __name__ == "__main__":
    main()

"""specattn in one's own engine: paged cache, block tables, every step one call per layer.

A step serves a prompt that is still being read in pieces, a draft of another request that is
verified, and a token of a third that decodes plainly. No row is padded: queries lie one behind the
other, and `cu_seqlens_q` says whose they are::

    q                 [tokens, Hq, D]             of all requests, in the order of the batch
    k_pages, v_pages  [pages, page_size, Hk, D]   the layer's pool; the step's keys are stored first
    cache_seqlens     [B] int32                   tokens of each request before its rows
    block_table       [B, max_pages] int32        pages of each request, in order
    cu_seqlens_q      [B + 1] int32               request b owns rows cu[b] to cu[b + 1]
"""

import torch
import torch.nn.functional as F

import specattn

VOCABULARY, WIDTH, Q_HEADS, KV_HEADS, HEAD_DIM, MAX_TOKENS = 16, 32, 4, 2, 16, 96
PAGE_SIZE, CHUNK, DRAFT, LENGTH = 16, 8, 3, 60


class ToyModel:
    """Embedding, one attention layer, head, all with random weights."""

    def __init__(self):
        self.embedding, self.head = torch.randn(2, VOCABULARY, WIDTH)
        self.positions = torch.randn(MAX_TOKENS, WIDTH)
        self.in_proj = torch.randn(WIDTH, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM) / WIDTH**0.5
        self.out_proj = torch.randn(Q_HEADS * HEAD_DIM, WIDTH) / WIDTH**0.5

    def qkv(self, tokens, positions):
        """Return q, k and v, each [tokens, heads, D]."""
        x = (self.embedding[tokens] + self.positions[positions]) @ self.in_proj
        return x.unflatten(-1, (-1, HEAD_DIM)).split((Q_HEADS, KV_HEADS, KV_HEADS), dim=-2)

    def logits(self, tokens, out):
        """Return the logits behind each token, given the attention's result."""
        return (self.embedding[tokens] + out.flatten(-2) @ self.out_proj) @ self.head.T

    def greedy(self, text, length):
        """Continue a text by dense attention to all of it, without specattn."""
        while len(text) < length:
            q, k, v = (x.transpose(0, 1) for x in self.qkv(text, torch.arange(len(text))))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            text = torch.cat([text, self.logits(text, out.transpose(0, 1))[-1:].argmax(-1)])
        return text


class Request:
    """A text, and how many of its tokens lie in the cache."""

    def __init__(self, prompt, pages, *, drafts):
        self.text, self.pages, self.drafts, self.cached = prompt, pages, drafts, 0

    def rows(self):
        """Return the tokens of the next step: of the prompt, or the last one and its draft."""
        known = self.text[self.cached :]
        if len(known) > 1:
            return known[:CHUNK]
        if not self.drafts:
            return known
        before = (self.text[:-1] == self.text[-1]).nonzero().flatten().tolist()
        guess = self.text[before[-1] + 1 :][:DRAFT] if before else self.text[:0]
        return torch.cat([known, guess])

    def take(self, rows, following):
        """Keep what the model agreed with, given the token that it puts behind each row."""
        known = min(len(rows), len(self.text) - self.cached)
        agreed = known
        while agreed < len(rows) and rows[agreed] == following[agreed - 1]:
            agreed += 1
        self.cached += agreed  # what was refused is written over
        if self.cached >= len(self.text):
            self.text = torch.cat([self.text, rows[known:agreed], following[agreed - 1 : agreed]])


def step(model, pools, requests):
    """Run the model once for all requests, whatever each of them is doing."""
    rows = [request.rows() for request in requests]
    counts = torch.tensor([len(one) for one in rows])
    cu_seqlens_q = F.pad(counts.cumsum(0), (1, 0)).int()
    seqlens = torch.tensor([request.cached for request in requests], dtype=torch.int32)
    block_table = torch.stack([request.pages for request in requests])

    owner = torch.arange(len(requests)).repeat_interleave(counts)
    positions = seqlens[owner] + torch.arange(len(owner)) - cu_seqlens_q[owner]
    q, k, v = model.qkv(torch.cat(rows), positions)
    slots = block_table[owner, positions // PAGE_SIZE], positions % PAGE_SIZE
    pools[0][slots], pools[1][slots] = k, v
    out, _ = specattn.hybrid_tree_attention(
        q, *pools, seqlens, None, None, block_table=block_table,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max(CHUNK, DRAFT + 1))  # fmt: skip
    following = model.logits(torch.cat(rows), out).argmax(-1).split(counts.tolist())
    for request, own, after in zip(requests, rows, following, strict=True):
        request.take(own, after)
    return counts.tolist()


def main():
    """Serve three requests until each is long enough, and hold them to dense attention."""
    torch.manual_seed(0)
    model, pages = ToyModel(), MAX_TOKENS // PAGE_SIZE
    pools = torch.empty(2, 3 * pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    tables = torch.randperm(3 * pages).view(3, pages).int()
    prompts = [torch.randint(VOCABULARY, (length,)) for length in (45, 9, 3)]
    requests = [
        Request(prompt, table, drafts=drafts)
        for prompt, table, drafts in zip(prompts, tables, (True, True, False), strict=True)
    ]
    steps = []
    while running := [one for one in requests if len(one.text) < LENGTH]:
        steps.append(step(model, pools, running))
    print("rows per request, step by step:", *steps[:6])
    for prompt, request in zip(prompts, requests, strict=True):
        expected = model.greedy(prompt, len(request.text))
        equal = torch.equal(request.text, expected)
        print(f"{len(prompt)} tokens became {len(request.text)}, plain greedy: {equal}")
    print(f"{len(steps)} steps, one call each")


if __name__ == "__main__":
    main()

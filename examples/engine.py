"""A decoding engine over specattn: paged cache, ragged batch, drafted trees, one call per layer.

A step serves whatever its requests are doing: one reads a part of its prompt, another verifies a
tree that was drafted from its own text, a third decodes plainly. No row is padded::

    q, k, v           [tokens, heads, D]          rows of all requests, one request behind the other
    cu_seqlens_q      [B + 1] int32               request b owns rows cu[b] to cu[b + 1]
    cache_seqlens     [B] int32                   tokens of each request that its rows all see
    block_table       [B, max_pages] int32        pages of each request, in order
    tree_mask         [tokens, max rows] bool     its request's rows that a row sees: ancestors
    k_pages, v_pages  [pages, page_size, Hk, D]   a layer's pool, shared by all requests
"""

import torch
import torch.nn.functional as F

import specattn

VOCABULARY, WIDTH, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 16, 32, 2, 4, 2, 16
PAGE_SIZE, MAX_TOKENS, CHUNK, LENGTH = 16, 96, 8, 72
BRANCHES, DEPTH = 3, 4  # earlier places that a tree is drafted from, and tokens from each


class Model:
    """Random weights; `attend(layer, q, k, v)` is whoever runs it: one text or an engine."""

    def __init__(self):
        self.embedding, self.head = torch.randn(2, VOCABULARY, WIDTH)
        self.positions = torch.randn(MAX_TOKENS, WIDTH)
        self.in_proj = torch.randn(LAYERS, WIDTH, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM) / WIDTH**0.5
        self.out_proj = torch.randn(LAYERS, Q_HEADS * HEAD_DIM, WIDTH) / WIDTH**0.5

    def logits(self, tokens, positions, attend):
        """Return the logits behind each token."""
        x = self.embedding[tokens] + self.positions[positions]
        for layer in range(LAYERS):
            heads = (x @ self.in_proj[layer]).unflatten(-1, (-1, HEAD_DIM))
            q, k, v = heads.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=-2)
            x = x + attend(layer, q, k, v).flatten(-2) @ self.out_proj[layer]
        return F.layer_norm(x, (WIDTH,)) @ self.head.T

    def greedy(self, text, length):
        """Continue a text without specattn, reading all of it for every token."""

        def dense(_, *heads):
            q, k, v = (x.transpose(0, 1) for x in heads)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(0, 1)

        while len(text) < length:
            logits = self.logits(text, torch.arange(len(text)), dense)
            text = torch.cat([text, logits[-1:].argmax(-1)])
        return text


class Request:
    """A text, how many of its tokens lie in the cache, and where."""

    def __init__(self, prompt, pages, *, drafts):
        self.text, self.pages, self.drafts, self.cached = prompt, pages, drafts, 0

    def rows(self):
        """Return the next step's rows: a chain of the prompt, or the last token and its drafts."""
        known = self.text[self.cached :][:CHUNK]
        if len(known) > 1 or not self.drafts:
            return specattn.Tree.chain(len(known) - 1), known
        return self._drafted()

    def _drafted(self):
        """Draft what followed the last token where it stood before, as one tree."""
        text = self.text.tolist()
        places = [at for at, token in enumerate(text[:-1]) if token == text[-1]][-BRANCHES:]
        paths = [tuple(text[at + 1 :][:DEPTH]) for at in places]
        nodes = {path[:n] for path in paths for n in range(1, DEPTH + 1)}  # as a tree numbers them:
        tokens = [path[-1] for path in sorted(nodes, key=lambda path: (len(path), path))]
        return specattn.Tree.from_paths(paths), torch.tensor([text[-1], *tokens])

    def take(self, tree, tokens, following):
        """Keep the rows that the model agrees with, by what it puts behind each; return them."""
        if self.cached + len(tokens) < len(self.text):  # more of the prompt is to be read
            kept, new = torch.arange(len(tokens)), tokens[:0]
        elif self.cached + 1 < len(self.text):  # its end
            kept, new = torch.arange(len(tokens)), following[-1:]
        else:
            found = specattn.acceptance.accept_samples(tree, tokens[None], following[None])
            kept = F.pad(found.nodes[0, : found.counts[0]], (1, 0))  # and the root
            new = torch.cat([tokens[kept[1:]], found.next_token])
        places = self.cached + torch.arange(len(kept))
        slots = self.pages[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
        self.cached += len(kept)
        self.text = torch.cat([self.text, new])
        return kept, slots


class Engine:
    """A model, and for each layer a pool of pages for keys and one for values."""

    def __init__(self, model, pages):
        self.model = model
        self.pools = torch.empty(LAYERS, 2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)

    def step(self, requests):
        """Run the model once for all requests; return how many rows each had."""
        trees, tokens = zip(*(request.rows() for request in requests), strict=True)
        counts = [len(one) for one in tokens]
        starts = F.pad(torch.tensor(counts).cumsum(0), (1, 0))
        seen = torch.zeros(sum(counts), max(counts), dtype=torch.bool)
        for tree, start, count in zip(trees, starts.tolist(), counts, strict=False):
            seen[start : start + count, :count] = tree.mask
        seqlens = torch.tensor([request.cached for request in requests], dtype=torch.int32)
        block_table = torch.stack([request.pages for request in requests])
        where = {"block_table": block_table, "cu_seqlens_q": starts.int()}
        heads = []

        def attend(layer, q, k, v):
            heads.append((k, v))  # only what is accepted goes to the cache
            read = q, *self.pools[layer], seqlens, k, v, seen
            return specattn.hybrid_tree_attention(*read, max_seqlen_q=max(counts), **where)[0]

        depths = torch.cat([tree.depths for tree in trees])
        positions = seqlens.repeat_interleave(torch.tensor(counts)) + depths
        logits = self.model.logits(torch.cat(tokens), positions, attend)
        following = logits.argmax(-1).split(counts)  # greedy; `acceptance.accept` samples
        for request, *found, start in zip(requests, trees, tokens, following, starts, strict=False):
            kept, slots = request.take(*found)
            for (k, v), pools in zip(heads, self.pools, strict=True):
                specattn.write_kv(k[start + kept], v[start + kept], *pools, slots)
        return counts


def main():
    """Serve three requests until each is long enough, and hold them to dense attention."""
    torch.manual_seed(0)
    pages = MAX_TOKENS // PAGE_SIZE
    engine, tables = Engine(Model(), 3 * pages), torch.randperm(3 * pages).view(3, pages).int()
    prompts = [torch.randint(VOCABULARY, (length,)) for length in (45, 9, 3)]
    requests = [
        Request(prompt, table, drafts=drafts)
        for prompt, table, drafts in zip(prompts, tables, (True, True, False), strict=True)
    ]
    steps = []
    while running := [one for one in requests if len(one.text) < LENGTH]:
        steps.append(engine.step(running))
    print("rows per request, step by step:", *steps[:8])
    for prompt, request in zip(prompts, requests, strict=True):
        equal = torch.equal(request.text, engine.model.greedy(prompt, len(request.text)))
        print(f"{len(prompt)} tokens became {len(request.text)}, plain greedy: {equal}")
    print(f"{len(steps)} steps, one call per layer each")


if __name__ == "__main__":
    main()

"""The drafter's equations token by token, in plain PyTorch: what `LongSpecDrafter` must equal.

Written from the paper (LongSpec, section 3.1 and v2 Algorithm 2) and from the drafter's documented
parameters, without its code: separate tokens and heads, no blocks, no shifted slices. The rotation
comes from the target's own model.
"""

from functools import lru_cache, wraps

import torch

from specattn.drafters import LongSpecDrafter


def random_drafter(model, *, window, seed=0, dtype=torch.float64):
    """Return a drafter for `model` whose parts all matter: no weight is left near zero or one."""
    drafter = LongSpecDrafter.for_target(model, target="tiny", window=window).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return drafter.eval()


def norm(x, weight, eps):
    """Return x / rms(x) * weight."""
    return x / (x.pow(2).mean() + eps).sqrt() * weight


@lru_cache(maxsize=256)
def _angles(rotary, position, dtype):
    """Return the cosines and the sines of a position, once for all heads."""
    return [r[0, 0] for r in rotary(torch.empty(0, dtype=dtype), torch.tensor([[position]]))]


def rotated(head, position, rotary):
    """Return one head's vector, its halves rotated by the target's angles at `position`."""
    cos, sin = _angles(rotary, position, head.dtype)
    half = len(head) // 2
    first, second = head[:half], head[half:]
    return torch.cat(
        [
            first * cos[..., :half] - second * sin[..., :half],
            second * cos[..., :half] + first * sin[..., :half],
        ]
    )


def attention(queries, keys, values):
    """Return the heads' outputs: queries a list of heads, keys and values [tokens, Hk, D]."""
    if len(keys) == 0:
        return torch.cat([torch.zeros_like(q) for q in queries])
    group = len(queries) // keys.shape[1]
    outs = []
    for head, q in enumerate(queries):
        logits = keys[:, head // group] @ q / len(q) ** 0.5
        outs.append(logits.softmax(0) @ values[:, head // group])
    return torch.cat(outs)


def stated_once(method):
    """Let a statement compute once what a method returns for the same numbers.

    The tokens of a path see the same text, and paths the same tokens.
    """

    @wraps(method)
    def known(self, *given):
        numbers = (
            x.detach().numpy().tobytes() if isinstance(x, torch.Tensor) else x for x in given
        )
        asked = (method.__name__, *numbers)
        if asked not in self.known:
            self.known[asked] = method(self, *given)
        return self.known[asked]

    return known


class Statement:
    """One request: remembers the keys and values of the tokens that were run."""

    def __init__(self, drafter, rotary):
        self.known = {}
        self.parameters = {n: p.detach() for n, p in drafter.named_parameters()}
        self.config, self.rotary = drafter.config, rotary

    def heads(self, part, x, position):
        """Return queries, keys (both normed and rotated) and values of a token, lists of heads."""
        config, weights = self.config, self.parameters
        y = weights[f"{part}.qkv_proj.weight"] @ x
        if config.qkv_bias:
            y = y + weights[f"{part}.qkv_proj.bias"]
        heads = list(y.split(config.head_dim))
        ends = config.num_attention_heads, config.num_attention_heads + config.num_key_value_heads
        q, k, v = heads[: ends[0]], heads[ends[0] : ends[1]], heads[ends[1] :]
        if config.qk_norm:
            q = [norm(h, weights[f"{part}.q_norm.weight"], config.rms_norm_eps) for h in q]
        if config.qk_norm and k:
            k = [norm(h, weights[f"{part}.k_norm.weight"], config.rms_norm_eps) for h in k]
        return (
            [rotated(h, position, self.rotary) for h in q],
            [rotated(h, position, self.rotary) for h in k],
            v,
        )

    @stated_once
    def keys_and_values(self, embedding, position):
        """Return what self attention keeps of a token: two tensors [Hk, D]."""
        x = norm(embedding, self.parameters["self_norm.weight"], self.config.rms_norm_eps)
        _, k, v = self.heads("self_attention", x, position)
        return torch.stack(k), torch.stack(v)

    def token(self, embedding, position, earlier, target_keys, target_values):
        """Return the normed output of one token.

        `earlier` lists (position, embedding) of the tokens before it on its path, in any order;
        `target_keys`, `target_values` [n, Hk, D] are what it may see of the target.
        """
        weights, eps = self.parameters, self.config.rms_norm_eps
        seen = [
            self.keys_and_values(e, p)
            for p, e in [*earlier, (position, embedding)]
            if position - self.config.window < p <= position
        ]
        keys, values = (torch.stack(x) for x in zip(*seen, strict=True))
        x = embedding
        q, _, _ = self.heads("self_attention", norm(x, weights["self_norm.weight"], eps), position)
        x = x + weights["self_attention.o_proj.weight"] @ attention(q, keys, values)
        q, _, _ = self.heads(
            "cross_attention", norm(x, weights["cross_norm.weight"], eps), position
        )
        x = x + weights["cross_attention.o_proj.weight"] @ attention(q, target_keys, target_values)
        y = weights["gate_up_proj.weight"] @ norm(x, weights["mlp_norm.weight"], eps)
        gate, up = y.chunk(2)
        x = x + weights["down_proj.weight"] @ (gate * gate.sigmoid() * up)
        return norm(x, weights["norm.weight"], eps)

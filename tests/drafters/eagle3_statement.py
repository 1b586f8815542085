"""EAGLE-3's drafter pair by pair, in plain PyTorch: what `Eagle3Drafter` must equal, in every mode.

Written from the paper (arXiv 2503.01840, section 3.1), from what the published folders hold and
from the drafter's documented parameters, without its code: separate pairs and heads, one root and
one path at a time.
"""

import torch

from specattn.drafters import Eagle3Drafter
from tests.drafters.statement import attention, norm, rotated, stated_once

NORMS = {
    "plain": {},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
}


def random_drafter(model, *, layers=(1, 2, 3), tokens=None, seed=0, dtype=torch.float64, **own):
    """Return a drafter for `model` whose parts all matter: no weight is left near zero or one."""
    config = Eagle3Drafter.for_target(model, target="tiny", feature_layers=layers).config
    for name, value in {**own, "draft_vocab_size": tokens}.items():
        setattr(config, name, value)
    drafter = Eagle3Drafter(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
        if drafter.d2t is not None:
            known = torch.randperm(config.vocab_size, generator=generator)[:tokens].sort().values
            drafter.d2t.copy_(known - torch.arange(tokens))
    return drafter.eval()


class Statement:
    """The equations of one drafter."""

    def __init__(self, drafter, rotary):
        self.weights = {n: p.detach() for n, p in drafter.named_parameters()}
        self.config, self.rotary, self.known = drafter.config, rotary, {}

    def drafted(self, embeddings, features, path):
        """Return the hidden states that are drafted behind a root and along a path.

        `embeddings` are those of all tokens up to the root, `features` the target's of all tokens
        before it; `path` are the embeddings of the tokens behind it. Entry s is drafted at depth s.
        """
        pairs = [(e, self.fused(f)) for e, f in zip(embeddings[1:], features, strict=True)]
        outs = []
        for depth in range(len(path) + 1):
            if depth:
                pairs.append((path[depth - 1], outs[-1]))
            outs.append(self.layer(pairs))
        return outs

    def normed(self, x, name):
        """Return x normed by the weight of that name."""
        return norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    @stated_once
    def fused(self, feature):
        """Return g of the features of a token, all layers side by side."""
        if self.config.norm_before_fc:
            feature = self.normed(feature, "input_norm")
        if self.config.fc_norm:
            parts = feature.split(self.config.hidden_size)
            feature = torch.cat([self.normed(x, f"fc_norm.{n}") for n, x in enumerate(parts)])
        return self.weights["fc.weight"] @ feature

    def layer(self, pairs):
        """Return what the layer makes of the last pair: of those before, it sees a window's."""
        layer, own = "midlayer", "midlayer.self_attn"
        read = [
            torch.cat(
                [self.normed(e, f"{layer}.input_layernorm"), self.normed(g, f"{layer}.hidden_norm")]
            )
            for e, g in pairs
        ]
        first = max(0, len(read) - (self.config.window or len(read)))
        seen = list(enumerate(read))[first:]
        keys = torch.stack([self.heads(f"{own}.k", x, at) for at, x in seen])
        values = torch.stack([self.heads(f"{own}.v", x, None) for _, x in seen])
        queries = list(self.heads(f"{own}.q", read[-1], len(read) - 1))
        stream = pairs[-1][1]
        if self.config.norm_before_residual:
            stream = self.normed(stream, f"{layer}.hidden_norm")
        x = stream + self.weights[f"{own}.o_proj.weight"] @ attention(queries, keys, values)
        y = self.normed(x, f"{layer}.post_attention_layernorm")
        gate, up = (self.weights[f"{layer}.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        x = x + self.weights[f"{layer}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        return self.normed(x, "norm") if self.config.norm_output else x

    @stated_once
    def heads(self, part, x, position):
        """Return the heads [n, D] of one projection: rotated where there is a position."""
        y = self.weights[f"{part}_proj.weight"] @ x
        if self.config.qkv_bias:
            y = y + self.weights[f"{part}_proj.bias"]
        heads = y.split(self.config.head_dim)
        if position is None:
            return torch.stack(heads)
        if self.config.qk_norm:
            heads = [self.normed(h, f"{part}_norm") for h in heads]
        return torch.stack([rotated(h, position, self.rotary) for h in heads])

    def logits(self, hidden):
        """Return the logits of the drafter's own vocabulary."""
        read = hidden if self.config.norm_output else self.normed(hidden, "norm")
        return self.weights["lm_head.weight"] @ read

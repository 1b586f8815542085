"""PosS' drafter pair by pair, in plain PyTorch: what `PosSDrafter` must equal, in every mode.

Written from the paper (PosS, section 2 and 3) and from the drafter's documented parameters, without
its code: separate pairs and heads, one root and one path at a time.
"""

import torch

from specattn.drafters import PosSDrafter
from tests.drafters.statement import attention, norm, rotated, stated_once

BOTH_NORMS = {"fc_norm": True, "norm_output": True}


def random_drafter(model, *, layers=3, positions_per_layer=1, seed=0, dtype=torch.float64, **norms):
    """Return a drafter for `model` whose parts all matter, each specialist unlike the others."""
    drafter = PosSDrafter.for_target(
        model, target="tiny", layers=layers, positions_per_layer=positions_per_layer, **norms
    ).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return drafter.eval()


class Statement:
    """The equations of one drafter."""

    def __init__(self, drafter, rotary):
        self.weights = {n: p.detach() for n, p in drafter.named_parameters()}
        self.config, self.rotary, self.known = drafter.config, rotary, {}

    def drafted(self, embeddings, features, path):
        """Return the features that are drafted behind a root and along a path.

        `embeddings` are those of all tokens up to the root, `features` the target's of all tokens
        before it; `path` are the embeddings of the tokens behind it. Entry s is drafted at depth s.
        """
        pairs = [self.fuse(e, f) for e, f in zip(embeddings[1:], features, strict=True)]
        outs = []
        for depth in range(len(path) + 1):
            if depth:
                pairs.append(self.fuse(path[depth - 1], outs[-1]))
            layer = min(depth // self.config.positions_per_layer, self.config.layers - 1)
            outs.append(self.specialist(layer, pairs))
        return outs

    @stated_once
    def fuse(self, embedding, feature):
        """Return fc of a pair."""
        if self.config.fc_norm:
            feature = norm(feature, self.weights["fc_norm.weight"], self.config.rms_norm_eps)
        x = self.weights["fc.weight"] @ torch.cat([embedding, feature])
        return x + self.weights["fc.bias"] if self.config.fc_bias else x

    def specialist(self, layer, pairs):
        """Return what a specialist makes of the last pair, all of them before its eyes."""
        config, prefix = self.config, f"specialists.{layer}."
        weights = {n.removeprefix(prefix): w for n, w in self.weights.items() if prefix in n}
        cache = [self.keys_and_values(layer, x, at) for at, x in enumerate(pairs)]
        keys, values = (torch.stack(part) for part in zip(*cache, strict=True))
        queries = self.heads(layer, "q", pairs[-1], len(pairs) - 1)
        x = pairs[-1] + weights["attention.o_proj.weight"] @ attention(queries, keys, values)
        gate, up = (weights["gate_up_proj.weight"] @ norm(
            x, weights["norm.weight"], config.rms_norm_eps
        )).chunk(2)  # fmt: skip
        x = x + weights["down_proj.weight"] @ (gate * gate.sigmoid() * up)
        if config.norm_output:
            x = norm(x, weights["output_norm.weight"], config.rms_norm_eps)
        return x

    @stated_once
    def keys_and_values(self, layer, x, position):
        """Return what a specialist's attention keeps of a pair: two tensors [Hk, D]."""
        return self.heads(layer, "kv", x, position)

    def heads(self, layer, part, x, position):
        """Return a specialist's queries of a pair, a list of heads, or keys and values, stacked."""
        config, own = self.config, f"specialists.{layer}.attention"
        y = self.weights[f"{own}.{part}_proj.weight"] @ x
        if config.qkv_bias:
            y = y + self.weights[f"{own}.{part}_proj.bias"]
        found = list(y.split(config.head_dim))
        if part == "kv":
            found, values = found[: len(found) // 2], found[len(found) // 2 :]
        if config.qk_norm:
            gain = self.weights[f"{own}.{part[0]}_norm.weight"]
            found = [norm(h, gain, config.rms_norm_eps) for h in found]
        found = [rotated(h, position, self.rotary) for h in found]
        return found if part == "q" else (torch.stack(found), torch.stack(values))

"""A block's equations row by row, in plain PyTorch: what DFlash's and JetFlow's drafters equal."""

import torch
import torch.nn.functional as F

from specattn.drafters import DFlashConfig, DFlashDrafter
from tests.drafters.statement import attention, norm, rotated

SIZE = 5
"""Rows of a block."""


def random_drafter(model, *, seed=0, dtype=torch.float32, **changes):
    """Return a drafter for `model` whose parts all matter."""
    own = {
        "layers": 2,
        "feature_layers": [1, 2],
        "block_size": SIZE,
        "mask_token_id": model.config.vocab_size - 1,
    }
    own |= changes
    drafter = DFlashDrafter(DFlashConfig.for_target(model, target="tiny", **own)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return drafter.eval()


def stated(drafter, rotary, features, embeds, window=None):
    """Return the normed rows [size, H] of a block behind features [n, layers * H], row by row.

    With a `window` they see so many positions up to the block's last one. Those of a causal head
    see no later rows, and count from themselves.
    """
    weights, config = {n: p.detach() for n, p in drafter.named_parameters()}, drafter.config
    eps, text = config.rms_norm_eps, len(features)
    seen = [norm(weights["fc.weight"] @ f, weights["hidden_norm.weight"], eps) for f in features]

    def heads(layer, part, x, position):
        y = weights[f"layers.{layer}.self_attn.{part}_proj.weight"] @ x
        if config.qkv_bias:
            y = y + weights[f"layers.{layer}.self_attn.{part}_proj.bias"]
        found = list(y.split(config.head_dim))
        if part == "v":
            return found
        if config.qk_norm:
            gain = weights[f"layers.{layer}.self_attn.{part}_norm.weight"]
            found = [norm(head, gain, eps) for head in found]
        return [rotated(head, position, rotary) for head in found]

    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        read = [norm(x, own["input_layernorm.weight"], eps) for x in embeds]
        keys, values = (
            torch.stack([torch.stack(heads(layer, part, x, n)) for n, x in enumerate(seen + read)])
            for part in "kv"
        )
        rows = []
        for at, (x, entered) in enumerate(zip(embeds, read, strict=True)):
            end = text + (at + 1 if config.causal else len(embeds))
            first = 0 if window is None else max(0, end - window)
            q = heads(layer, "q", entered, text + at)
            out = attention(q, keys[first:end], values[first:end])
            x = x + own["self_attn.o_proj.weight"] @ out
            inner = norm(x, own["post_attention_layernorm.weight"], eps)
            gate, up = (own[f"mlp.{part}_proj.weight"] @ inner for part in ("gate", "up"))
            rows.append(x + own["mlp.down_proj.weight"] @ (F.silu(gate) * up))
        embeds = rows
    return torch.stack([norm(x, weights["norm.weight"], eps) for x in embeds])

"""The sizes of models: what one pass has to read and to multiply.

This is the project's only table of model shapes; the benchmarks read it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specattn.embedded import EMBEDDED_TARGET


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model, named as in its ``config.json`` where that is short enough.

    Attributes
    ----------
    name : str
    family : str
        The ``model_type`` of its configuration.
    layers, hidden, q_heads, kv_heads, head_dim, vocab : int
    intermediate : int
        Width of the MLP, or of one expert.
    experts, experts_per_token : int
        0 for a dense model.
    window, sliding_layers : int
        Layers that see only so many tokens; 0 where none slides.
    tied : bool
        Whether the table of embeddings is the head.
    attends_every : int
        Of so many layers the last one attends; the others keep a state in place of keys.
    state_k_heads, state_v_heads, state_k_dim, state_v_dim : int
        Of these; 0 where every layer attends.
    """

    name: str
    family: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    window: int = 0
    sliding_layers: int = 0
    tied: bool = False
    attends_every: int = 1
    state_k_heads: int = 0
    state_v_heads: int = 0
    state_k_dim: int = 0
    state_v_dim: int = 0

    @classmethod
    def named(cls, name: str) -> ModelShape:
        """Return a shape of `MODELS`, or that of a Hugging Face directory; else ValueError."""
        if name in MODELS:
            return MODELS[name]
        if Path(name).is_dir():
            return cls.from_config(Path(name))
        if name == EMBEDDED_TARGET.name:
            raise ValueError(
                f"--shape: '{name}' is read from examples/{name}/config.json of a source checkout, "
                "which is not here"
            )
        raise ValueError(f"--shape: expected one of {', '.join(MODELS)}, or a folder, got {name!r}")

    @classmethod
    def from_config(cls, folder: Path) -> ModelShape:
        """Read the ``config.json`` of a Hugging Face directory; ValueError where sizes lack."""
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            return cls.of(config, folder.resolve().name)
        except OSError as error:
            raise ValueError(f"--shape: {folder}: {error.strerror or error}") from None
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"--shape: {folder}/config.json: {error!r}") from None

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str) -> ModelShape:
        """Return the shape that a ``config.json`` says; KeyError where sizes lack."""
        if config.get("kv_lora_rank"):
            raise ValueError(f"--shape: {name} has latents (MLA), whose passes plan does not know")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kinds = config.get("layer_types") or []
        window = config.get("sliding_window") or 0
        slides = sum(kind == "sliding_attention" for kind in kinds)
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        states = {}
        if attending := len(kinds) - kinds.count("linear_attention"):
            states = {"attends_every": len(kinds) // attending}
        if "linear_attention" in kinds:
            states |= {
                f"state_{letter}_{ours}": config[f"linear_{theirs}"]
                for letter, word in (("k", "key"), ("v", "value"))
                for ours, theirs in (("heads", f"num_{word}_heads"), ("dim", f"{word}_head_dim"))
            }
        return cls(
            name=name,
            family=config["model_type"],
            layers=config["num_hidden_layers"],
            hidden=hidden,
            q_heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config.get("moe_intermediate_size") or config["intermediate_size"],
            vocab=config["vocab_size"],
            experts=experts,
            experts_per_token=config.get("num_experts_per_tok", 0) if experts else 0,
            window=window if slides else 0,
            sliding_layers=slides if window else 0,
            tied=bool(config.get("tie_word_embeddings")),
            **states,
        )

    @property
    def state_layers(self) -> int:
        """Layers that keep a state in place of keys."""
        return self.layers - self.layers // self.attends_every

    @property
    def full_layers(self) -> int:
        """Layers that see the whole context."""
        return self.layers - self.sliding_layers - self.state_layers

    @property
    def attention_weights(self) -> int:
        """Elements of the projections of one layer that attends."""
        gates = self.q_heads if self.family in _GATED else 0
        return self.hidden * self.head_dim * (2 * (self.q_heads + self.kv_heads) + gates)

    @property
    def state_weights(self) -> int:
        """Elements of the projections of one layer that keeps a state; values have gates."""
        keys, values = self.state_k_heads * self.state_k_dim, self.state_v_heads * self.state_v_dim
        return self.hidden * (2 * keys + 3 * values + 2 * self.state_v_heads)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one request in one layer, float32."""
        return 4 * self.state_v_heads * self.state_k_dim * self.state_v_dim

    @property
    def mixer_weights(self) -> int:
        """Elements of the projections of all layers, their MLPs left out."""
        attending = self.layers - self.state_layers
        return attending * self.attention_weights + self.state_layers * self.state_weights

    @property
    def mlp_weights(self) -> int:
        """Elements of the gated MLP of one layer, or of one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        """Elements of the head."""
        return self.hidden * self.vocab

    def weights_read(self, tokens: int) -> float:
        """Return the elements that a pass of so many tokens reads, the head's included.

        Of E experts, tokens that choose k each touch E (1 - (1 - k/E)^tokens) when they choose
        independently.
        """
        mlp: float = self.mlp_weights
        if self.experts:
            untouched = (1 - self.experts_per_token / self.experts) ** tokens
            mlp *= self.experts * (1 - untouched)
        return self.mixer_weights + self.layers * mlp + self.head_weights

    @property
    def weights_per_token(self) -> int:
        """Elements that one token is multiplied with."""
        mlp = self.mlp_weights * (self.experts_per_token or 1)
        return self.mixer_weights + self.layers * mlp + self.head_weights

    def weights_stored(self) -> int:
        """Return all elements, the table of embeddings included."""
        mlp = self.mlp_weights * (self.experts or 1)
        tables = 1 if self.tied else 2
        return self.mixer_weights + self.layers * mlp + tables * self.head_weights

    def cache_elements(self, context: int) -> int:
        """Return the elements of K and V of one request in one layer; no window cuts them."""
        return 2 * self.kv_heads * self.head_dim * context


_GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # gates as wide as the queries

MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("qwen3-8b", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape(
            *("qwen3-30b-a3b", "qwen3_moe", 48, 2048, 32, 4, 128, 768, 151936),
            experts=128,
            experts_per_token=8,
        ),
        ModelShape(
            *("gpt-oss-20b", "gpt_oss", 24, 2880, 64, 8, 64, 2880, 201088),
            experts=32,
            experts_per_token=4,
            window=128,
            sliding_layers=12,
        ),
        ModelShape("qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, tied=True),
        ModelShape("qwen3-1.7b", "qwen3", 28, 2048, 16, 8, 128, 6144, 151936, tied=True),
        ModelShape("qwen3-4b", "qwen3", 36, 2560, 32, 8, 128, 9728, 151936, tied=True),
        ModelShape("llama-3.2-1b", "llama", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        ModelShape("vicuna-7b", "llama", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape(
            *("qwen3.5-0.8b", "qwen3_5_text", 24, 1024, 8, 2, 256, 3584, 248320),
            tied=True,
            attends_every=4,
            state_k_heads=16,
            state_v_heads=16,
            state_k_dim=128,
            state_v_dim=128,
        ),
    )
}
"""By name; the embedded target's is read from its ``config.json``, where that is."""
if (EMBEDDED_TARGET / "config.json").is_file():
    MODELS[EMBEDDED_TARGET.name] = ModelShape.from_config(EMBEDDED_TARGET)

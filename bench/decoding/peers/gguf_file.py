"""A checkpoint of the Qwen3 architecture as GGUF, without its tokenizer: peers get token ids."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

MODEL_TYPE, ARCHITECTURE = "qwen3", gguf.MODEL_ARCH.QWEN3
STORED = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
"""Types of matrices; those of 8 and 4 bits have a scale for each 32 weights."""

_DESCRIBED = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim", "value_length": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps", "vocab_size": "vocab_size",
}  # fmt: skip


def write(model: Path, dtype: str, folder: Path) -> Path:
    """Write a checkpoint into `folder`; raises ValueError for another architecture or type."""
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != MODEL_TYPE:
        raise ValueError(f"model_type: expected {MODEL_TYPE}, got '{config['model_type']}'")
    if dtype not in STORED:
        raise ValueError(f"dtype: expected one of {', '.join(STORED)}, got '{dtype}'")
    name = gguf.MODEL_ARCH_NAMES[ARCHITECTURE]
    path = folder / f"{model.resolve().name}-{dtype}.gguf"
    partial = path.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(partial, name)
    _describe(writer, config)
    names = gguf.get_tensor_name_map(ARCHITECTURE, config["num_hidden_layers"])
    for own, values in _tensors(model):
        renamed = names.get_name(own, try_suffixes=(".weight",))
        if renamed is None:
            raise ValueError(f"{own} has no name in GGUF's {name}")
        # llama.cpp adds and multiplies with vectors, those of the norms, in float32 alone.
        stored = STORED[dtype] if values.ndim > 1 else STORED["float32"]
        writer.add_tensor(renamed, gguf.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(path)
    return path


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    if rope["rope_type"] != "default":
        raise ValueError(f"rope_type: expected default, got '{rope['rope_type']}'")
    for key, name in _DESCRIBED.items():
        getattr(writer, f"add_{key}")(config[name])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_tokenizer_model("none")


def _tensors(model: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor in float32; safetensors is a header in JSON and bytes behind it."""
    for path in sorted(model.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        start = 8 + int(data[:8].view("<u8")[0])
        header = json.loads(bytes(data[8:start]))
        for name, one in header.items():
            if name == "__metadata__":
                continue
            begin, end = one["data_offsets"]
            raw = data[start + begin : start + end]
            yield name, _float32(raw, one["dtype"]).reshape(one["shape"])


def _float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":  # the upper half of a float32
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)

"""llama.cpp, as a worker: runs in ``.venv-llama-cpp``, which ``make llama-cpp`` makes.

The checkpoint is written as GGUF in the type that it is measured in, or in 8 or 4 bits a weight, as
llama.cpp's users run it (`weights`); `ngram` drafts by the binding's own prompt lookup. Flash
attention is on; the cache is float32 beside float32 weights and float16, llama.cpp's default,
beside 16-bit ones.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_file
import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import serve


class LlamaCpp:
    """A context for one request."""

    version = importlib.metadata.version("llama-cpp-python")

    def __init__(self, settings: dict[str, Any]):
        dtype, threads = settings["dtype"], settings["threads"]
        stored = settings.get("weights", dtype)
        path = gguf_file.write(Path(settings["model"]), stored, Path(settings["cache"]))
        cached = llama_cpp.GGML_TYPE_F32 if dtype == "float32" else llama_cpp.GGML_TYPE_F16
        drafted = settings.get("ngram", 0)
        lookup = LlamaPromptLookupDecoding(num_pred_tokens=drafted) if drafted else None
        self.model = llama_cpp.Llama(
            str(path),
            n_ctx=settings["capacity"] + drafted,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            flash_attn=True,
            type_k=cached,
            type_v=cached,
            draft_model=lookup,
            logits_all=lookup is not None,  # 0.3.36 keeps too few beside a draft unless told
            verbose=False,
        )

    def forget(self) -> None:
        """Drop the cached prompt."""
        self.model.reset()

    def generate(self, prompt: list[int], new_tokens: int) -> Iterator[list[int]]:
        """Yield a pass's tokens; the longest prefix that is in the cache is not read again."""
        tokens = self.model.generate(prompt, temp=0.0, repeat_penalty=1.0)
        found: list[int] = []
        for place, token in zip(range(len(prompt), len(prompt) + new_tokens), tokens, strict=False):
            found.append(token)
            # A pass goes on where the token is the one that was drafted.
            if place >= self.model.n_tokens or self.model.input_ids[place] != token:
                yield found
                found = []
        if found:
            yield found


if __name__ == "__main__":
    serve(LlamaCpp)

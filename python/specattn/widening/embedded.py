"""An embedded target in the sizes of a real model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from specattn.embedded import EMBEDDED
from specattn.planning import MODELS, ModelShape
from specattn.widening.multiples import Multiples
from specattn.widening.source import Source
from specattn.widening.write import widen


def widened_target(like: str, within: Path) -> Path:
    """Return the folder of an embedded target and its drafters in a real model's sizes.

    It is the embedded hybrid where layers of the real one keep a state. The folder is
    ``within / like``, made once, in bfloat16. Raises as `widen` does.
    """
    folder = within / like
    if not folder.is_dir():
        within.mkdir(parents=True, exist_ok=True)
        real = MODELS[like]
        small = EMBEDDED["tiny-hybrid" if real.state_layers else "tiny"]
        tokenizer = AutoTokenizer.from_pretrained(small, local_files_only=True)
        times = Multiples.towards(real, ModelShape.from_config(small))
        widen(Source.load(small, tokenizer), folder, times, torch.bfloat16)
    return folder

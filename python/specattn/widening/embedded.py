"""The embedded target in the sizes of a real model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from specattn.planning import MODELS
from specattn.planning.models import EMBEDDED_TARGET
from specattn.widening.multiples import Multiples
from specattn.widening.source import Source
from specattn.widening.write import widen


def widened_target(like: str, within: Path) -> Path:
    """Return the folder of the embedded target and its drafters in a real model's sizes.

    It is ``within / like``, made once, in bfloat16. Raises as `widen` does.
    """
    folder = within / like
    if not folder.is_dir():
        within.mkdir(parents=True, exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET, local_files_only=True)
        times = Multiples.towards(MODELS[like], MODELS[EMBEDDED_TARGET.name])
        widen(Source.load(EMBEDDED_TARGET, tokenizer), folder, times, torch.bfloat16)
    return folder

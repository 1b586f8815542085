"""`calibrate`: time all that a method may draft, before the first text that counts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)

from specattn.decoding.engine.method import Method, RunOptions, Texts, run
from specattn.decoding.generate import resolved
from specattn.decoding.model.text_model import text_model
from specattn.decoding.passes.replay import Compile

_NEW = 16  # tokens: rounds without a draft are timed first, then everything else at once


def calibrate(
    model: PreTrainedModel,
    method: Method | str = "auto",
    *,
    length: int = 512,
    batch: int = 1,
    compile: Compile = "auto",
    kv_dtype: str | None = None,
) -> dict[str, Any]:
    """Time at once what else is timed little by little, as drafts come to pay for it.

    Runs of the process on this model that are alike, batch and length within half, then draft from
    the first tokens on. With the environment variable ``SPECATTN_CACHE``, those of later processes
    on this machine do so too. CUDA graphs are captured, and kernels compiled, on the way.

    Parameters
    ----------
    model : PreTrainedModel
    method : Method or str
        Which will draft.
    length, batch : int
        Tokens of a text, and requests.
    compile, kv_dtype
        As for `generate`.

    Returns
    -------
    dict
        Milliseconds of passes and drafts, by size: ``Statistics.details`` of the run.

    Raises
    ------
    ValueError
        `length` or `batch` is not positive; as for `generate` besides.
    """
    for name, value in (("length", length), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    model, end = text_model(model), length + _NEW
    generator = torch.Generator().manual_seed(0)
    shape = batch, length
    prompts = torch.randint(
        model.config.vocab_size, shape, generator=generator, dtype=torch.int64, device="cpu"
    )
    rules = (
        [LogitsProcessorList()] * batch,
        [StoppingCriteriaList([MaxLengthCriteria(end)])] * batch,
    )
    texts = Texts(list(prompts.to(model.device)), [0] * batch, *rules)
    options = RunOptions(compile=compile, kv_dtype=kv_dtype, calibrates=True)
    _, statistics = run(resolved(method), model, texts, GenerationConfig(do_sample=False), options)
    return statistics.details

"""Where a method's trained drafter comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import PreTrainedModel

from specattn.drafters import TrainedDrafter

D = TypeVar("D", bound=TrainedDrafter)


def fitting_drafter(kind: type[D], given: D | Path | str | None, model: PreTrainedModel) -> D:
    """Return a drafter that can draft for `model`, or raise ValueError that says why none is found.

    `given` is a drafter or its folder; by default the folder named after the method (its
    ``model_type``) within the model's own.
    """
    if isinstance(given, kind):
        drafter = given
    else:
        own = Path(model.config._name_or_path) / kind.config_class.model_type
        if given is None and not own.is_dir():
            raise ValueError(
                f"{kind.title} needs a drafter: none was given, and {own} is not a folder"
            )
        drafter = kind.from_pretrained(cast(Any, given) or own, dtype=model.dtype)
        cast(Any, drafter).to(model.device)
    drafter.config.check_target(model.config)
    if (drafter.device, drafter.dtype) != (model.device, model.dtype):
        raise ValueError(
            f"the drafter is {drafter.dtype} on {drafter.device}, the target {model.dtype} on "
            f"{model.device}"
        )
    return drafter

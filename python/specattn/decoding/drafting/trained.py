"""What methods with a trained drafter share: where it comes from, and trees of given widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from transformers import PreTrainedModel
from transformers.utils import logging

from specattn.decoding.engine.method import Method
from specattn.decoding.model.checkpoint import folder_of
from specattn.decoding.model.model import Model
from specattn.drafters import TrainedDrafter
from specattn.drafters.heads import Heads

D = TypeVar("D", bound=TrainedDrafter)
H = TypeVar("H", bound=Heads)
M = TypeVar("M", bound=PreTrainedModel)


def fitting_drafter(kind: type[D], given: D | Path | str | None, model: PreTrainedModel) -> D:
    """Return a drafter that can draft for `model`, or raise ValueError that says why none is found.

    `given` is a drafter or its folder; by default the folder named after the method (its
    ``model_type``) within the model's own.
    """
    if isinstance(given, kind):
        drafter = given
    else:
        own = folder_of(model) / kind.config_class.model_type
        if given is None and not own.is_dir():
            raise ValueError(
                f"{kind.title} needs a drafter: none was given, and {own} is not a folder"
            )
        folder = Path(own if given is None else cast(Any, given))
        if not folder.is_dir():
            raise ValueError(f"drafter: {folder} is not a folder")

        def load() -> D:
            found: Any = kind.from_pretrained(folder, dtype=model.dtype)
            return cast(D, found.to(model.device))

        drafter = remembered(model, kind.title, folder, load)
    drafter.config.check_target(model.config)
    if (drafter.device, drafter.dtype) != (model.device, model.dtype):
        raise ValueError(
            f"the drafter is {drafter.dtype} on {drafter.device}, the target {model.dtype} on "
            f"{model.device}"
        )
    return drafter


def remembered(model: PreTrainedModel, what: str, folder: Path, load: Callable[[], M]) -> M:
    """Return what `load` makes of a folder, once for `model`, until its files are others.

    It is remembered with `model`, and goes with it. Loading shows no progress bars.
    """
    kept = Model.of(model).recall("drafters", dict[tuple[str, Path], tuple[Any, Any]])
    place = what, folder.resolve()
    files = sorted((file.name, file.stat()) for file in folder.iterdir()) if folder.is_dir() else []
    stamp = [(name, found.st_mtime_ns, found.st_size) for name, found in files]
    former, found = kept.get(place, (None, None))
    if former != stamp or (found.dtype, found.device) != (model.dtype, model.device):
        with _no_progress_bars():
            found = load()
        kept[place] = stamp, found
    return cast(M, found)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Show none of transformers', and leave its setting and the Hub's as they were."""
    shown, on_hub = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
        if on_hub:
            enable_progress_bars()
        else:
            disable_progress_bars()


@dataclass(frozen=True)
class Trained(Method, Generic[D]):
    """Drafting by what was trained for the target: an instance of `kind`, or the folder of one."""

    kind: ClassVar[type[TrainedDrafter]]

    drafter: D | Path | str | None = None

    @classmethod
    def offered(cls, folder: Path, depth: int) -> str | None:
        """Return what drafter of the method lies in a folder of a target of `depth` layers."""
        own = cls.kind.config_class.model_type
        return f"in {own}/" if (folder / own).is_dir() else None

    def prepared(self, model: PreTrainedModel) -> Self:
        """Return this method with its drafter loaded and found to fit `model`."""
        found: Any = fitting_drafter(self.kind, self.drafter, model)
        return replace(self, drafter=found)

    def loaded(self, model: PreTrainedModel) -> D:
        """Return the drafter, ready to draft for `model`."""
        return cast(D, cast(Any, self.prepared(model).drafter).eval())


@dataclass(frozen=True)
class Headed(Trained[H]):
    """Drafting by heads: trees of first ranks, `most_widths` of each level unless `widths` say it.

    The first `headless` levels are drafted otherwise.
    """

    most_widths: ClassVar[tuple[int, ...]]
    headless: ClassVar[int] = 0

    widths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_widths(self)

    def clipped(self, depth: int) -> Self:
        """Return this method with at most `depth` levels of given widths, and 1 at least."""
        if self.widths is None:
            return self
        return replace(self, widths=self.widths[: max(1, depth)])

    def prepared(self, model: PreTrainedModel) -> Self:
        """Return this method with its heads loaded and found to fit `model`."""
        method = super().prepared(model)
        if self.widths is None:
            return method
        config, needed = cast(H, method.drafter).config, len(self.widths) - self.headless
        if needed > config.num_heads:
            said = needed if self.headless else "as many"
            raise ValueError(
                f"widths: {len(self.widths)} levels need {said} heads, not {config.num_heads}"
            )
        if max(self.widths) > config.vocab_size:
            raise ValueError(
                f"widths: {max(self.widths)} of a vocabulary of {config.vocab_size} tokens"
            )
        return method

    def widths_of(self, heads: H) -> tuple[int, ...]:
        """Return how many ranks follow every node, level by level, of the largest tree."""
        if self.widths is not None:
            return self.widths
        levels = self.headless + heads.config.num_heads
        return tuple(min(width, heads.config.vocab_size) for width in self.most_widths[:levels])


def check_widths(method: Any) -> None:
    """Make a tuple of a method's `widths`, or raise ValueError where they are none."""
    if method.widths is not None:
        object.__setattr__(method, "widths", tuple(method.widths))
        if not method.widths or min(method.widths) < 1:
            raise ValueError(f"widths must be one or more positive numbers, got {method.widths}")

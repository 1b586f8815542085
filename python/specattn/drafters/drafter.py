"""What all drafters have in common: a folder that names its target, and loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specattn.drafters.fields import read_fields, read_rope
from specattn.drafters.folders import read_config, read_weights
from specattn.drafters.layouts import own_fields

_Drafter = TypeVar("_Drafter", bound="TrainedDrafter")


class DrafterConfig(PreTrainedConfig):
    """What every drafter's ``config.json`` has.

    Attributes
    ----------
    target : str
        Name or path of the target model that the drafter was trained for.
    shared : tuple of str
        Fields that must be equal in drafter and target, for the drafter to read what it reads.
    """

    shared: ClassVar[tuple[str, ...]] = ()

    target: str = ""

    @classmethod
    def shared_with(cls, config: PreTrainedConfig) -> dict[str, Any]:
        """Return the values of `shared` fields for a target of this `config`."""
        shared = {name: getattr(config, name, None) for name in cls.shared}
        if "head_dim" in shared and shared["head_dim"] is None:
            shared["head_dim"] = config.hidden_size // config.num_attention_heads
        return shared

    def check_target(self, config: PreTrainedConfig) -> None:
        """Raise ValueError unless the drafter fits a target of this `config`."""
        for name, expected in self.shared_with(config).items():
            own = getattr(self, name)
            self.check(name, own, expected, own == expected)

    def check(self, what: str, own: Any, of_target: Any, fits: bool) -> None:
        """Raise ValueError, with both values, unless the drafter `fits` the target there."""
        if not fits:
            trained = f"; it was trained for {self.target!r}" if self.target else ""
            raise ValueError(
                f"the drafter does not fit the target: its {what} is {own}, the target's is "
                f"{of_target}{trained}"
            )


class TrainedDrafter(PreTrainedModel):
    """A drafter's own weights: those of the target that it uses are not part of it.

    Attributes
    ----------
    config : DrafterConfig
    title : str
        The method's name, for messages.
    """

    config: DrafterConfig
    config_class: type[DrafterConfig]
    title: ClassVar[str]
    base_model_prefix = "drafter"

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type[_Drafter], folder: str | Path, *, dtype: torch.dtype | None = None
    ) -> _Drafter:
        """Load the drafter of a folder, in a `dtype` or as it is stored, ready to draft.

        Raises ValueError where the folder holds no drafter of this kind, a field of its
        ``config.json`` that is not served, by its name, or weights that do not fit.
        """
        return cls.of_found(folder, cls.read(Path(folder)), dtype)

    @classmethod
    def of_found(
        cls: type[_Drafter], folder: str | Path, found: Found, dtype: torch.dtype | None
    ) -> _Drafter:
        """Return the drafter of what was `found` in a folder; ValueError: weights do not fit."""
        if not isinstance(dtype, torch.dtype | None):
            raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
        wrong = f"the weights in {folder} do not fit its config.json"
        try:
            with torch.device("meta"):
                drafter = cls(found.config)
        except (ArithmeticError, RuntimeError):
            raise ValueError(f"{wrong}: no memory has sizes of {found.sizes}") from None
        needed = drafter.state_dict()
        odd = {
            "missing keys": needed.keys() - found.weights.keys(),
            "unexpected keys": found.weights.keys() - needed.keys(),
            "mismatched keys": [
                f"{name} is {list(weight.shape)}, expected {list(needed[name].shape)}"
                for name, weight in found.weights.items()
                if name in needed and weight.shape != needed[name].shape
            ],
        }
        if said := [f"{what} {', '.join(sorted(names))}" for what, names in odd.items() if names]:
            raise ValueError(f"{wrong}: {'; '.join(said)}, by {found.sizes}")
        weights = dict[str, torch.Tensor]()
        for name, weight in found.weights.items():
            own = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
            weights[name] = weight.to(own, copy=True)  # the file's pages may be written anew
        drafter.load_state_dict(weights, assign=True)
        return drafter.eval()

    @classmethod
    def read(cls, folder: Path) -> Found:
        """Return what a folder holds that `save_pretrained` wrote; see `from_pretrained`."""
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        given = read_config(folder)
        if (kind := given.get("model_type")) != cls.config_class.model_type:
            raise ValueError(
                f"{folder} holds a model of type {kind!r}, not a {cls.title} drafter (model_type)"
            )
        fields = own_fields(cls.config_class, DrafterConfig)
        values = read_fields(folder, given, fields)
        if "rope_parameters" in values:
            values["rope_parameters"] = read_rope(values)
        own = {name: value for name, value in values.items() if name != "quantization_config"}
        return Found(cls.config_class(**own), read_weights(folder), values.sizes(fields))


class Found(NamedTuple):
    """What a folder holds.

    Attributes
    ----------
    config : DrafterConfig
    weights : dict of Tensor
        By the drafter's own names.
    sizes : str
        Sizes of the weights as the folder's configuration says them, for messages.
    """

    config: DrafterConfig
    weights: dict[str, torch.Tensor]
    sizes: str

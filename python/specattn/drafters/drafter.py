"""What all drafters have in common: a folder that names its target, and loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig, PreTrainedModel

from specattn.drafters.folders import check_weights, read_config

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
        cls: type[_Drafter], folder: str | Path, **options: Any
    ) -> _Drafter:
        """Load a drafter that `save_pretrained` wrote; other formats of weights are not loaded.

        `options`, such as ``dtype``, are those of `transformers.PreTrainedModel.from_pretrained`.
        Raises ValueError where the folder holds no drafter of this kind, or weights that do not fit
        its configuration.
        """
        cls._check_folder(Path(folder))
        try:
            loaded: Any = super().from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported just below, with its name
                output_loading_info=True,
                **options,
            )
        except SafetensorError as error:
            raise ValueError(f"the weights in {folder} cannot be read: {error}") from None
        drafter, report = loaded
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if found := report[kind]:
                raise ValueError(
                    f"the weights in {folder} do not fit its config.json: "
                    f"{kind.replace('_', ' ')} {', '.join(map(str, sorted(found)))}"
                )
        return drafter

    @classmethod
    def of_weights(
        cls: type[_Drafter],
        folder: str | Path,
        config: DrafterConfig,
        weights: dict[str, torch.Tensor],
        dtype: torch.dtype | None,
    ) -> _Drafter:
        """Return a drafter of weights that were read from another's `folder`, by our names.

        They are as stored unless a `dtype` is given. ValueError: they do not fit `config`.
        """
        drafter: Any = cls(config)
        needed = drafter.state_dict()
        if odd := needed.keys() ^ weights.keys():
            raise ValueError(
                f"the weights in {folder} do not fit its config.json: missing or unexpected "
                f"{', '.join(sorted(odd))}"
            )
        for name, weight in weights.items():
            if weight.shape != needed[name].shape:
                raise ValueError(
                    f"the weights in {folder} do not fit its config.json: {name} is "
                    f"{list(weight.shape)}, expected {list(needed[name].shape)}"
                )
        drafter.load_state_dict(weights)
        found: _Drafter = drafter.to(dtype or weights["fc.weight"].dtype)
        return found

    @classmethod
    def _check_folder(cls, folder: Path) -> None:
        """Raise ValueError unless the folder holds configuration and weights of this kind."""
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        if (kind := read_config(folder).get("model_type")) != cls.config_class.model_type:
            raise ValueError(f"{folder} holds a model of type {kind!r}, not a {cls.title} drafter")
        check_weights(folder)

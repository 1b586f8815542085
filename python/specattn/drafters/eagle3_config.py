"""What an EAGLE-3 drafter is made of, and which targets it fits."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from specattn.drafters.layer import LayerConfig


class Eagle3Config(LayerConfig):
    """What an EAGLE-3 drafter is made of; ``config.json`` of a folder that this package writes.

    Its fields beside these are `LayerConfig`'s, `vocab_size` the target's.

    Attributes
    ----------
    target_hidden_size : int or None
        Width of the target's features; None: the drafter's own.
    feature_layers : list of int, or None
        Behind how many of the target's layers its features are taken. None: 2, half of all, and all
        but 3.
    draft_vocab_size : int or None
        Tokens that the head knows; None: all of the target's.
    own_embedding : bool
        Whether the drafter has an embedding of its own; else it reads the target's.
    norm_before_residual : bool
        Whether the residual stream begins as the normed g.
    norm_before_fc, fc_norm : bool
        Whether features are normed before ``fc``: all layers' together, or each by itself (EAGLE
        3.1). No more than one of them.
    norm_output : bool
        Whether the next step reads the normed a, as the head does (EAGLE 3.1).
    window : int or None
        Positions that the layer reaches back, the pair's own included. None: all.

    Raises
    ------
    ValueError
        A count is not positive, both norms of features are given, or the rope is not static.
    """

    model_type = "eagle3"
    shared = ("vocab_size",)

    target_hidden_size: int | None = None
    feature_layers: list[int] | None = None
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    window: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other, got both")
        if self.feature_layers is not None and min(self.feature_layers, default=0) < 1:
            raise ValueError(f"feature_layers must be positive, got {self.feature_layers}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 position, got {self.window}")
        if not 1 <= self.head_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size must be from 1 to {self.vocab_size}, got {self.draft_vocab_size}"
            )
        if not self.own_embedding and self.feature_size != self.hidden_size:
            raise ValueError(
                f"hidden_size: a drafter of width {self.hidden_size} cannot read the embedding of "
                f"a target of width {self.feature_size} (target_hidden_size)"
            )

    @property
    def feature_size(self) -> int:
        """Width of the target's features of one layer."""
        return self.target_hidden_size or self.hidden_size

    @property
    def head_size(self) -> int:
        """Tokens that the head knows."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def features(self) -> int:
        """Layers whose features ``fc`` reads."""
        return 3 if self.feature_layers is None else len(self.feature_layers)

    def layers_of(self, config: PreTrainedConfig) -> tuple[int, ...]:
        """Return behind how many layers a target of this `config` has its features taken."""
        if self.feature_layers is not None:
            return tuple(self.feature_layers)
        return usual_layers(config.num_hidden_layers)

    def check_target(self, config: PreTrainedConfig) -> None:
        """Raise ValueError, with both numbers, unless it fits a target of this `config`."""
        width = config.hidden_size
        self.check("hidden_size", self.feature_size, width, self.feature_size == width)
        super().check_target(config)
        deepest, depth = max(self.layers_of(config)), config.num_hidden_layers
        self.check("deepest layer", deepest, depth, deepest <= depth)


def usual_layers(depth: int) -> tuple[int, int, int]:
    """Return behind how many of `depth` layers the published drafters read.

    ValueError: there are fewer than 4.
    """
    if depth < 4:
        raise ValueError(f"a target of {depth} layers has no low, middle and high one: name them")
    return 2, depth // 2, depth - 3

"""`Model`: what was computed of a checkpoint and is cached for as long as the checkpoint lives."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from specattn.distributed.tensor import TensorParallel

T = TypeVar("T")


class Model:
    """What is remembered about one checkpoint: `recall` says what, and makes it once.

    By kind:

    - ``"text"``: its causal text model (`text_model`)
    - ``"tensor parallel"``: the ranks that it is divided over
    - ``"told", reason``: that its passes are not replayed, which is said once
    - ``"structures"``: those that it was seen to have (`structure_of`)
    - ``"proved", structure, in training, dtype, dtypes, device``: that it computes with our
      attention what it does with its own
    - ``"replayed", structure, dtype, device, stored``: that its passes may be replayed
    - ``"corpora"``: indexes of files that are looked up, and what it generated
    - ``"reordered"``: copies of weights that are read in another order
    - ``"quantised"``: by kind, a model with the same weights in fewer bits
    - ``"rounded in place", kind``: that its own layers were rounded
    - ``"MTP head", dtype, device``: the one among the weights in its folder, if there is one
    - ``"drafter beside it", dtype, device``: the trained drafter in its folder
    - ``"drafters"``: what was loaded from folders that methods were given, by kind and folder
    - ``"pace", ...``: what passes and drafts took, by batch and length; what drafters were worth

    Beside these there is what the last run computed in, `Workspace`, which a run takes and returns.

    Nothing that is remembered may hold the checkpoint itself, or it would never be freed.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, object] = {}
        self._workspaces: list[Any] = []  # the last run's workspace; none while a run has it

    @classmethod
    def of(cls, checkpoint: PreTrainedModel) -> Model:
        """Return the one `Model` of a checkpoint in this process."""
        return _models.setdefault(checkpoint, cls())

    def recall(self, kind: Hashable, make: Callable[[], T]) -> T:
        """Return what was made of this kind before, or make it now."""
        if kind not in self._known:
            self._known[kind] = make()
        found: T = self._known[kind]  # type: ignore[assignment]
        return found

    def forget(self, *kinds: Hashable) -> None:
        """Let go of what was made of these kinds; who needs it makes it again."""
        for kind in kinds:
            self._known.pop(kind, None)

    def take(self) -> Any:
        """Return the last run's workspace, which then is its taker's alone, or None."""
        try:
            return self._workspaces.pop()  # one call, so no two threads get the same
        except IndexError:
            return None

    def give_back(self, workspace: Any) -> None:
        """Keep a workspace for the next run, in place of any other."""
        self._workspaces[:] = [workspace]

    @staticmethod
    def ranks_of(checkpoint: PreTrainedModel) -> TensorParallel | None:
        """Return the ranks that a checkpoint is divided over, None where it is whole."""
        found = Model.of(checkpoint)
        return found.recall("tensor parallel", lambda: TensorParallel.of(checkpoint))

    def knows(self, kind: Hashable) -> bool:
        """Whether something of this kind was made before."""
        return kind in self._known


_models: WeakKeyDictionary[PreTrainedModel, Model] = WeakKeyDictionary()

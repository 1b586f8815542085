"""Predicts the time of one pass of a model: products with weights, attention, host, exchanges."""

from __future__ import annotations

from dataclasses import dataclass

from specattn.ops.cost import Sizes
from specattn.ops.hybrid_tree_attention import cost as hybrid_cost
from specattn.ops.select_topk import cost as select_cost
from specattn.ops.sparse_gather_attention import cost as gather_cost
from specattn.ops.verify_attention import cost_scores

from .links import LINKS, Link
from .machines import Machine
from .models import ModelShape


@dataclass(frozen=True)
class Workload:
    """What is decoded, and on what.

    Attributes
    ----------
    model : ModelShape
    machine : Machine
    context : int
        Cached tokens of each request.
    batch : int
        Requests.
    size : int
        Bytes of an element.
    eager : bool
        Whether the host launches every operator anew, or replays a graph, as this package's passes
        on a GPU do.
    ranks : int
        Such machines over which the full-attention layers of the cache are sharded.
    link : Link
        What connects them.
    """

    model: ModelShape
    machine: Machine
    context: int
    batch: int = 1
    size: int = 2
    eager: bool = True
    ranks: int = 1
    link: Link = LINKS["nvlink"]

    @property
    def stored(self) -> int:
        """Bytes of weights and caches, on each rank."""
        model = self.model
        cache = model.cache_elements(self.context)
        cache = cache * model.sliding_layers + self.share(cache) * model.full_layers
        states = self.batch * model.state_layers * model.state_bytes
        return self.size * (model.weights_stored() + self.batch * cache) + states

    def share(self, keys: int) -> int:
        """Return how many of so many keys a rank has."""
        return -(-keys // self.ranks)

    def exchange(self, rows: int) -> float:
        """Return the seconds of one exchange of softmax states, for `rows` rows per request."""
        state = self.model.q_heads * (self.model.head_dim * self.size + 4)
        return self.link.all_gather(self.ranks, self.batch * rows * state)

    def products(self, rows: int, read: float, per_row: int) -> float:
        """Return the seconds that rows take which read so many weights, each `per_row` of them."""
        tokens = self.batch * rows
        return self.machine.seconds("linear", tokens, self.size * read, 2 * tokens * per_row)

    def attention(self, rows: int, keys: int, sparse: bool = False, scores: bool = False) -> float:
        """Return the seconds of one layer's attention to `keys` cached tokens and a chain."""
        model, op = self.model, "sparse_gather_attention" if sparse else "hybrid_tree_attention"
        sizes = Sizes(
            B=self.batch,
            T=rows,
            Hq=model.q_heads,
            Hk=model.kv_heads,
            D=model.head_dim,
            e=self.size,
            S=rows,
            L=keys,
            N=self.context,
            tree_pairs=rows * (rows + 1) // 2,
            indices=self.batch,
        )
        cost = (gather_cost if sparse else cost_scores if scores else hybrid_cost)(sizes)
        packed = rows * model.q_heads // model.kv_heads
        return self.machine.seconds(op, packed, cost.bytes, cost.operations)

    def states(self, rows: int) -> float:
        """Return the seconds of one layer with a state: verified, then committed.

        A state is read twice and written once, about as fast as weights are read.
        """
        tokens, state = self.batch * rows, self.model.state_bytes
        return self.machine.seconds("linear", tokens, 3 * self.batch * state, tokens * state)


@dataclass(frozen=True)
class PassTime:
    """Seconds of one pass, by what takes them.

    Attributes
    ----------
    weights : float
        Reading them and multiplying with them.
    attention : float
        And layers with a state.
    host : float
        Launching.
    overlaps : bool
        Whether the host runs ahead of the device; else their times add up.
    exchange : float
        Between ranks.
    """

    weights: float
    attention: float
    host: float
    overlaps: bool
    exchange: float = 0.0

    @property
    def device(self) -> float:
        """Seconds of the device, waiting for other ranks included."""
        return self.weights + self.attention + self.exchange

    @property
    def total(self) -> float:
        """Where the host runs ahead the slower of the two counts."""
        device = self.device
        return max(device, self.host) if self.overlaps else device + self.host

    @property
    def bound(self) -> str:
        """What takes most of it."""
        names = ("weights", "attention", "exchange", "host")
        parts = {name: getattr(self, name) for name in names}
        if self.overlaps and self.host < self.device:
            del parts["host"]
        return max(parts, key=parts.__getitem__)


def pass_time(
    workload: Workload, rows: int, *, selected: int | None = None, collect: bool = False
) -> PassTime:
    """Predict a pass of `rows` new tokens per request.

    Parameters
    ----------
    workload : Workload
    rows : int
        T: 1 for a plain step, the nodes of the tree for a verification.
    selected : int, optional
        Cached tokens that full-attention layers read; all of them when None.
    collect : bool
        Whether the pass collects scores.

    Returns
    -------
    PassTime
    """
    model, machine = workload.model, workload.machine
    read = model.weights_read(workload.batch * rows)
    weights = workload.products(rows, read, model.weights_per_token)
    seen = workload.context if selected is None else min(selected, workload.context)
    options = {"sparse": selected is not None, "scores": collect}
    seconds = model.full_layers * workload.attention(rows, workload.share(seen), **options)
    if model.sliding_layers:
        seen = min(model.window, workload.context)
        seconds += model.sliding_layers * workload.attention(rows, seen)
    if model.state_layers:
        seconds += model.state_layers * workload.states(rows)
    host = model.layers * machine.layer_seconds if workload.eager else 0.0
    exchange = model.full_layers * workload.exchange(rows)
    return PassTime(weights, seconds, host, machine.overlaps, exchange)


def select_time(workload: Workload, selected: int) -> float:
    """Predict the selection of one list of tokens per layer and request, from its scores."""
    model = workload.model
    sizes = Sizes(
        B=workload.batch * model.full_layers,
        T=1,
        Hq=model.q_heads,
        Hk=model.kv_heads,
        D=model.head_dim,
        e=workload.size,
        L=workload.share(workload.context),
        N=workload.context,
        score_rows=1,
        selected=selected,
    )
    cost = select_cost(sizes)
    # A rank ranks its own tokens and sends the best with their positions, 8 bytes each, after two
    # small exchanges of how many.
    sent = 8 * workload.batch * model.full_layers * workload.share(selected)
    exchange = workload.link.all_gather(workload.ranks, sent)
    exchange += 2 * workload.link.all_gather(workload.ranks, 0)
    return workload.machine.seconds("select_topk", 1, cost.bytes, 0) + exchange

"""Random problems of layers with a state, and what plain recurrence makes of them, path by path.

Rows are kept ragged, [tokens, ..]; a problem whose requests have equally many is uniform, too.
"""

from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from hypothesis import strategies as st

from tests.cases import random_parents, restride

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1, 8, 8), (2, 4, 16, 24), (1, 3, 40, 8), (2, 2, 64, 72), (1, 2, 128, 128))


def path_of(parents, node):
    """Return the nodes from a root down to one."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


class Rows:
    """What both kinds of problem share: rows of B requests one after the other."""

    @property
    def starts(self):
        """Rows in front of each request, and all, as a list."""
        return [sum(self.rows[:i]) for i in range(len(self.rows) + 1)]

    def requests(self):
        """Return `(index, slice of its rows, its parents as a list)` of each request."""
        for index, (first, stop) in enumerate(pairwise(self.starts)):
            yield index, slice(first, stop), self.parents[first:stop].tolist()

    def row_options(self, ragged):
        """Return the keyword arguments that ragged rows need."""
        if not ragged:
            return {}
        starts = torch.tensor(self.starts, dtype=torch.int32)
        return {"cu_seqlens_q": starts, "max_seqlen_q": max(self.rows)}

    def of_rows(self, x, ragged):
        """Return rows as they are, or [B, T, ..]."""
        return x if ragged else x.unflatten(0, (len(self.rows), self.rows[0]))

    def given_parents(self, ragged):
        """Return `parents` as they are given; None where all are chains."""
        chains = all(tree == list(range(-1, len(tree) - 1)) for *_, tree in self.requests())
        return None if chains else self.of_rows(self.parents, ragged)

    def to(self, dtype):
        """Return the same numbers in another dtype; what is accumulated in float32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        kinds = dict.fromkeys(("q", "k", "v", "x", "weight", "bias", "conv_state"), dtype)

        def changed(name):
            x = getattr(self, name)
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                return x
            return x.to(kinds.get(name, wide))

        return replace(self, **{f.name: changed(f.name) for f in fields(self)})

    def paths(self, seed=0):
        """Return `(nodes, counts)` of a random path of each request, some of no length at all."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for _, _, parents in self.requests():
            node = int(torch.randint(-1, max(1, len(parents)), (), generator=generator))
            found.append(path_of(parents, min(node, len(parents) - 1)))
        nodes = torch.full((len(found), max(1, *map(len, found), 1)), -1)
        for index, path in enumerate(found):
            nodes[index, : len(path)] = torch.tensor(path, dtype=torch.int64)
        return nodes, torch.tensor([len(path) for path in found])


@dataclass(repr=False)
class GatedDelta(Rows):
    """Arguments of `gated_delta_tree`, rows ragged."""

    rows: tuple[int, ...]
    q: torch.Tensor  # [tokens, Hk, Dk]
    k: torch.Tensor
    v: torch.Tensor  # [tokens, Hv, Dv]
    g: torch.Tensor  # [tokens, Hv] or [tokens, Hv, Dk]
    beta: torch.Tensor  # [tokens, Hv]
    state: torch.Tensor  # [B, Hv, Dk, Dv]
    parents: torch.Tensor  # [tokens]
    l2_norm: bool = True

    def arguments(self, ragged=True):
        """Return the arguments by name."""
        names = ("q", "k", "v", "g", "beta")
        return {
            **{name: self.of_rows(getattr(self, name), ragged) for name in names},
            "state": self.state,
            "parents": self.given_parents(ragged),
            "l2_norm": self.l2_norm,
            **self.row_options(ragged),
        }

    def expected(self, dtype=torch.float64):
        """Return the outputs and the state behind every node, by recurrence along each path."""
        p = self.to(dtype)
        group = p.v.shape[1] // p.k.shape[1]
        q, k = p.q, p.k
        if p.l2_norm:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(group, 1) for x in (q * q.shape[-1] ** -0.5, k))
        a = (p.g if p.g.dim() == 3 else p.g[..., None]).exp()
        out, states = torch.empty_like(p.v), p.v.new_empty(len(p.v), *p.state.shape[1:])
        for index, rows, parents in self.requests():
            for node in range(len(parents)):
                S = p.state[index]
                for i in (rows.start + step for step in path_of(parents, node)):
                    S = a[i][..., None] * S
                    d = p.beta[i][:, None] * (p.v[i] - (S * k[i][..., None]).sum(-2))
                    S = S + k[i][..., None] * d[:, None]
                    out[rows.start + node] = (S * q[i][..., None]).sum(-2)
                states[rows.start + node] = S
        return out, states

    def committed(self, states, nodes, counts):
        """Return the states behind a path of each request, of those behind every node."""
        after = self.state.to(states.dtype).clone()
        for index, rows, _ in self.requests():
            if counts[index]:
                after[index] = states[rows.start + nodes[index, counts[index] - 1]]
        return after


@dataclass(repr=False)
class CausalConv(Rows):
    """Arguments of `causal_conv_tree`, rows ragged."""

    rows: tuple[int, ...]
    x: torch.Tensor  # [tokens, C]
    weight: torch.Tensor  # [C, K]
    bias: torch.Tensor | None
    conv_state: torch.Tensor  # [B, K - 1, C]
    parents: torch.Tensor  # [tokens]
    activation: str | None = None

    def arguments(self, ragged=True):
        """Return the arguments by name."""
        return {
            "x": self.of_rows(self.x, ragged),
            **{name: getattr(self, name) for name in ("weight", "bias", "conv_state")},
            "parents": self.given_parents(ragged),
            "activation": self.activation,
            **self.row_options(ragged),
        }

    def expected(self, dtype=torch.float64):
        """Return the outputs, and what is kept behind every node, by `conv1d` along each path."""
        p = self.to(dtype)
        out, kept = torch.empty_like(p.x), p.x.new_empty(len(p.x), *p.conv_state.shape[1:])
        for index, rows, parents in self.requests():
            for node in range(len(parents)):
                path = torch.tensor(path_of(parents, node)) + rows.start
                seen = torch.cat([p.conv_state[index], p.x[path]])[-p.weight.shape[1] :]
                wide = torch.nn.functional.conv1d(
                    seen.T[None], p.weight[:, None], p.bias, groups=len(p.weight)
                )
                out[rows.start + node] = wide[0, :, 0]
                kept[rows.start + node] = seen[1:]
        return torch.nn.functional.silu(out) if self.activation else out, kept

    def committed(self, kept, nodes, counts):
        """Return what is kept behind a path of each request, of that behind every node."""
        after = self.conv_state.to(kept.dtype).clone()
        for index, rows, _ in self.requests():
            if counts[index]:
                after[index] = kept[rows.start + nodes[index, counts[index] - 1]]
        return after


def _trees(rows, kind, generator):
    trees = [
        list(range(-1, size - 1)) if kind == "chain" else random_parents(size, generator)[:size]
        for size in rows
    ]
    if kind == "forest":  # several nodes follow the state
        trees = [[-1 if i % 3 == 2 else parent for i, parent in enumerate(tree)] for tree in trees]
    return torch.tensor([parent for tree in trees for parent in tree], dtype=torch.int64)


def make_gated_delta(
    rows=(4, 4), k_heads=2, v_heads=4, k_dim=16, v_dim=24, *, tree="tree", per_channel=False,
    decays="some", betas="some", dtype=torch.float32, strided=False, scale=1.0, l2_norm=True,
    seed=0,
):  # fmt: skip
    """Return a problem; `decays` are "some", "none" (g = 0) or "strong" (many of -50)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        x = torch.randn(*shape, generator=generator) * scale
        x = x.to(dtype)
        return restride(x) if strided else x

    def uniform(*shape):
        return torch.rand(*shape, generator=generator)

    tokens = sum(rows)
    gates = (tokens, v_heads, k_dim) if per_channel else (tokens, v_heads)
    g = -uniform(*gates)
    if decays == "none":
        g = torch.zeros(gates)
    elif decays == "strong":
        g = torch.where(uniform(*gates) < 0.4, torch.tensor(-50.0), g)
    beta = uniform(tokens, v_heads)
    if betas == "ends":
        beta = beta.round()
    state = torch.randn(len(rows), v_heads, k_dim, v_dim, generator=generator)
    return GatedDelta(
        tuple(rows),
        normal(tokens, k_heads, k_dim),
        normal(tokens, k_heads, k_dim),
        normal(tokens, v_heads, v_dim),
        g,
        beta,
        restride(state) if strided else state,
        _trees(rows, tree, generator),
        l2_norm,
    )


def make_causal_conv(
    rows=(4, 4), channels=24, taps=4, *, tree="tree", bias=True, activation="silu",
    dtype=torch.float32, strided=False, scale=1.0, seed=0,
):  # fmt: skip
    """Return a problem."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    x, kept = normal(sum(rows), channels), normal(len(rows), taps - 1, channels)
    if strided:
        x, kept = restride(x[:, None])[:, 0], restride(kept)
    weight = normal(channels, taps) / taps
    trees = _trees(rows, tree, generator)
    shift = normal(channels) if bias else None
    return CausalConv(tuple(rows), x, weight, shift, kept, trees, activation)


def _rows(draw, most):
    size = st.integers(1, most)
    if draw(st.booleans()):
        return (draw(size),) * draw(st.integers(1, 3)), False
    rows = draw(st.lists(st.just(0) | size, min_size=1, max_size=4))
    return (*rows, draw(size)), True


@st.composite
def gated_deltas(draw, dtypes=DTYPES, most=20, shapes=SHAPES, per_channel=True):
    """Return a random problem, and whether its rows are to be given ragged."""
    rows, ragged = _rows(draw, most)
    problem = make_gated_delta(
        rows,
        *draw(st.sampled_from(shapes)),
        tree=draw(st.sampled_from(["tree", "chain", "forest"])),
        per_channel=per_channel and draw(st.booleans()),
        decays=draw(st.sampled_from(["some", "none", "strong"])),
        betas=draw(st.sampled_from(["some", "ends"])),
        dtype=draw(st.sampled_from(dtypes)),
        strided=draw(st.booleans()),
        l2_norm=draw(st.booleans()),
        scale=draw(st.sampled_from([0.3, 0.1])),
        seed=draw(st.integers(0, 2**16)),
    )
    return problem, ragged


@st.composite
def causal_convs(draw, dtypes=DTYPES, most=20):
    """Return a random problem, and whether its rows are to be given ragged."""
    rows, ragged = _rows(draw, most)
    problem = make_causal_conv(
        rows,
        draw(st.sampled_from([1, 8, 24, 67, 200])),
        draw(st.sampled_from([2, 3, 4, 8])),
        tree=draw(st.sampled_from(["tree", "chain", "forest"])),
        bias=draw(st.booleans()),
        activation=draw(st.sampled_from([None, "silu"])),
        dtype=draw(st.sampled_from(dtypes)),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
    return problem, ragged

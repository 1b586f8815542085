"""The walk down one request's tree in plain Python, which others are compared with."""

import torch


def walked(parents, tokens, token_after):
    """Return the accepted nodes, and their tokens with the next one behind them.

    ``token_after(node, path)`` draws what the target puts after a node; `path` are the tokens of
    its path, the root's apart.
    """
    node, emitted = 0, [token_after(0, [])]
    reached = {0}
    while reached := {
        node
        for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))
        if token == emitted[-1] and parent in reached
    }:
        node = min(reached)
        emitted.append(token_after(node, emitted.copy()))
    nodes = []
    while node > 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1], emitted


def report_of(walks, depth):
    """Return per walk the number of accepted nodes, the next token, and the nodes, -1 behind."""
    return torch.tensor(
        [[len(nodes), said[-1], *nodes, *[-1] * (depth - len(nodes))] for nodes, said in walks]
    )

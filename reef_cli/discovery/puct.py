"""Which states to start from next: PUCT over an archive, with lineage blocking. Pure numbers; no storage, no problem.

    score(i) = Q_i + c * scale * P_i * sqrt(1 + T) / (1 + n_i)

Q is the best child's value once a child is known, else the state's own; P the rank weight of its value (best first); scale the
range of values of states that were found (of all, while there are none); n counts rollouts below a state, T all rollouts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SMALLEST_SCALE = 1e-6


@dataclass(frozen=True, slots=True)
class Node:
    """A state as PUCT sees it: its value, rollouts at or below it, its best child's value, and its ancestors."""

    id: int
    value: float
    initial: bool = False
    visits: int = 0
    best_child: float | None = None
    ancestors: frozenset[int] = frozenset()


def scores(nodes: Sequence[Node], total: int, c: float = 1.0) -> list[float]:
    """PUCT score per node, in the order given. Equal values rank in that order."""
    n = len(nodes)
    found = [node.value for node in nodes if not node.initial] or [node.value for node in nodes]
    scale = max(max(found) - min(found), SMALLEST_SCALE) if found else SMALLEST_SCALE
    ranking = sorted(range(n), key=lambda i: -nodes[i].value)
    weight = {i: n - rank for rank, i in enumerate(ranking)}
    whole = sum(weight.values())
    return [
        _q(node) + c * scale * (weight[i] / whole) * math.sqrt(1 + total) / (1 + node.visits) for i, node in enumerate(nodes)
    ]


def _q(node: Node) -> float:
    return node.value if node.visits == 0 or node.best_child is None else node.best_child


def choose(nodes: Sequence[Node], total: int, count: int, c: float = 1.0) -> list[int]:
    """Ids of `count` parents, best score first (ties: the higher value).

    A pick blocks its ancestors and descendants. When that leaves too few, blocked states follow by score; when there are too
    few states at all, the picks repeat in order.
    """
    found = scores(nodes, total, c)
    order = sorted(range(len(nodes)), key=lambda i: (-found[i], -nodes[i].value))
    picked: list[Node] = []
    for i in order:
        if len(picked) < count and not any(related(nodes[i], other) for other in picked):
            picked.append(nodes[i])
    taken = {node.id for node in picked}
    picked += [nodes[i] for i in order if nodes[i].id not in taken][: count - len(picked)]
    ids = [node.id for node in picked]
    return [ids[i % len(ids)] for i in range(count)] if ids else []


def related(left: Node, right: Node) -> bool:
    """Whether one is the other, or descends from it."""
    return left.id == right.id or left.id in right.ancestors or right.id in left.ancestors


def kept(values: Mapping[int, float], parents: Mapping[int, int | None], *, per_parent: int, most: int) -> set[int]:
    """Which found states stay: the best `per_parent` children of each parent, and of those at most the best `most`."""
    best: list[int] = []
    counts: dict[int | None, int] = {}
    for state in sorted(values, key=lambda state: (-values[state], state)):
        parent = parents[state]
        if counts.get(parent, 0) < per_parent:
            counts[parent] = counts.get(parent, 0) + 1
            best.append(state)
    return set(best[: max(0, most)])


def ancestors(state: int, parents: Mapping[int, int | None]) -> Iterable[int]:
    """The chain above a state, nearest first."""
    above = parents.get(state)
    while above is not None:
        yield above
        above = parents.get(above)

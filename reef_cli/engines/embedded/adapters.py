"""LoRA adapters on rows of a step: `y[rows] += scaling * B(A(x[rows]))` for the rows of each adapter.

The base weights stay untouched and keep their checkpoint names: adapters act through forward hooks on the linear layers they
target. A loaded adapter gets a number that is never used again, so cached keys of an unloaded one cannot be mistaken for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.engines.embedded.linear import rowwise
from reef_cli.weights.lora import Lora, read_lora


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter; `layers` maps module names to (A, B, scaling) in the engine's type."""

    name: str
    path: str
    number: int
    layers: dict[str, tuple[Tensor, Tensor, float]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the step under way per adapter; `index` None means every row."""

    adapter: Adapter
    index: Tensor | None


class Adapters:
    """The adapters a model can serve, by name."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, max_rank: int) -> None:
        self._dtype = dtype
        self._max_rank = max_rank
        self._numbers = count(1)
        self._hooked: set[str] = set()
        self._linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self.loaded: dict[str, Adapter] = {}
        self.rows: Sequence[Rows] = ()

    def read(self, name: str, path: str) -> Adapter:
        """Read and check an adapter folder without serving it yet; safe to call from another thread."""
        return self.check(name, path, read_lora(Path(path)))

    def check(self, name: str, path: str, lora: Lora) -> Adapter:
        """An adapter that is in memory already, in the shape it is served in. Raises `UnsupportedArtifact`."""
        if lora.rank > self._max_rank:
            raise UnsupportedArtifact(f"Adapter {name!r} has rank {lora.rank}; this engine accepts up to {self._max_rank}")
        layers: dict[str, tuple[Tensor, Tensor, float]] = {}
        for module, (a, b) in lora.tensors.items():
            target = self._linears.get(module)
            if target is None or a.shape[1] != target.in_features or b.shape[0] != target.out_features:
                raise UnsupportedArtifact(f"Adapter {name!r} does not fit the model at {module!r}")
            layers[module] = (a.to(self._dtype), b.to(self._dtype), lora.config.scaling(module))
        return Adapter(name, path, next(self._numbers), layers)

    def hooked(self, adapter: Adapter) -> bool:
        """Whether every layer it changes looks for adapters already; `add` may run beside a step then."""
        return adapter.layers.keys() <= self._hooked

    def add(self, adapter: Adapter) -> None:
        """Serve an adapter that was read."""
        for module in adapter.layers:
            if module not in self._hooked:
                self._hooked.add(module)
                self._linears[module].register_forward_hook(self._hook(module))
        self.loaded[adapter.name] = adapter

    def _hook(self, module: str) -> Any:
        def apply(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            for rows in self.rows:
                layer = rows.adapter.layers.get(module)
                if layer is not None:
                    _add(inputs[0], output, rows.index, *layer)
            return output

        return apply


def _add(x: Tensor, output: Tensor, index: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> None:
    """In place on `output [1, tokens, out]`; `x [1, tokens, in]`."""
    if index is None:
        output[0] += rowwise(rowwise(x[0], a), b) * scaling
        return
    output[0].index_add_(0, index, rowwise(rowwise(x[0, index], a), b) * scaling)

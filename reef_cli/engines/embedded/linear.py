"""Linear layers whose bits do not depend on how many rows a step has.

CPU kernels choose their order of summation by the number of rows. In bf16 it was seen to be one and the same from 2 to 32 rows
of the model's own layers, and from 4 to 32 of a LoRA adapter's, which have few inputs: with AMX another kernel begins at 33,
with AVX-512 a single row takes another. So rows are multiplied in such blocks. Seen on two cores with AMX: a step of 16
decoding rows takes as long as without, 256 tokens of a prompt take twice as long.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

MOST = 32
LEAST = 4
"""For any layer; `LEAST_OF_MODEL` is enough for layers with hundreds of inputs."""

LEAST_OF_MODEL = 2


def rowwise(x: Tensor, weight: Tensor, bias: Tensor | None = None, least: int = LEAST) -> Tensor:
    """`x [n, in]` times `weight [out, in]` -> `[n, out]`; each row as it would be in any other company."""
    n = len(x)
    if n == 0 or least <= n <= MOST:
        return linear(x, weight, bias)
    if n < least:
        return linear(x[torch.arange(least) % n], weight, bias)[:n]
    out = x.new_empty((n, len(weight)))
    for start in range(0, n, MOST):
        # A short last block reaches back over rows that are done already.
        first = min(start, n - least)
        out[start : start + MOST] = linear(x[first : start + MOST], weight, bias)[start - first :]
    return out


def make_rowwise(net: nn.Module) -> None:
    """Have every linear layer of a network multiply in blocks; forward hooks go on working."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    out = rowwise(x.reshape(-1, x.shape[-1]), module.weight, module.bias, LEAST_OF_MODEL)
    return out.view(*x.shape[:-1], -1)

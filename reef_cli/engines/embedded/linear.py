"""Linear layers whose bits do not depend on how many rows a step has.

CPU kernels choose their order of summation by the number of rows. In bf16 it was seen to be one and the same from 4 to 32 rows:
with AMX another kernel begins at 33, with AVX-512 a single row takes another, and a LoRA adapter's few inputs change it below
4. So rows are multiplied in blocks of 4 to 32.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

LEAST, MOST = 4, 32


def rowwise(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [n, in]` times `weight [out, in]` -> `[n, out]`; each row as it would be in any other company."""
    n = len(x)
    if LEAST <= n <= MOST:
        return linear(x, weight, bias)
    if n < LEAST:
        return linear(x[torch.arange(LEAST) % n], weight, bias)[:n] if n else linear(x, weight, bias)
    out = x.new_empty((n, len(weight)))
    for start in range(0, n, MOST):
        # A short last block reaches back over rows that are done already.
        first = min(start, n - LEAST)
        out[start : start + MOST] = linear(x[first : start + MOST], weight, bias)[start - first :]
    return out


def make_rowwise(net: nn.Module) -> None:
    """Have every linear layer of a network multiply in blocks; forward hooks go on working."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    out = rowwise(x.reshape(-1, x.shape[-1]), module.weight, module.bias)
    return out.view(*x.shape[:-1], -1)

"""Pure-torch stand-in for SGLang's compiled kernels, which no package index has for CPUs.

It provides the two functions that SGLang 0.5.23 calls on its native CPU path; every other name can be imported and raises when
called. Made for the tests of one SGLang version on a machine without accelerator, and for nothing else.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

__version__ = "0.4.10"


def copy_all_layer_kv_cache_cpu(
    k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], tgt_loc: Tensor, src_loc: Tensor, *_: Any, **__: Any
) -> None:
    for buffer in [*k_buffers, *v_buffers]:
        buffer[tgt_loc] = buffer[src_loc]


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, _stride: int
) -> None:
    offset = 0
    for i in range(req_pool_indices.numel()):
        first, last = int(start[i]), int(end[i])
        count = last - first
        req_to_token[req_pool_indices[i], first:last] = out_cache_loc[offset : offset + count].to(req_to_token.dtype)
        offset += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on this CPU")

    missing.__name__ = name
    return missing


def _without_pinning(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return wrapped


def _drop_pinning() -> None:
    """LoRA buffers ask for pinned memory, which needs an accelerator."""
    for name in ("tensor", "empty", "zeros", "full", "ones", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self  # type: ignore[assignment]
    torch._pin_memory_dropped = True  # type: ignore[attr-defined]


if not torch.cuda.is_available() and not getattr(torch, "_pin_memory_dropped", False):
    _drop_pinning()

"""Only the values of weights that changed, with a digest, and how an engine takes them in.

A change of a tensor is the flat positions of its changed values and the values themselves. The engine spreads them over a
tensor of NaN and loads that as it loads any checkpoint, fused or split over ranks as its model does it, while every copy keeps
what the source leaves NaN. So no engine needs to know where a value ends up. Values that are NaN themselves cannot be sent this
way.
Imports torch alone: this very file also runs inside SGLang, which finds it as `reef_delta` on its path and calls `load` by name
(`--custom-weight-loader`, `load_format`).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DIGEST, INDEX, SHAPE = "reef|digest", "|index", "|shape"
_BITS = {2: torch.int16, 4: torch.int32}


def difference(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor] | None:
    """Positions and values to send, both flat; None where the whole tensor is no larger, or cannot be told this way."""
    bits = _BITS.get(new.element_size())
    if bits is None or new.shape != old.shape or new.dtype != old.dtype or new.numel() == 1:
        return None
    flat = new.contiguous().view(-1)
    index = (flat.view(bits) != old.contiguous().view(-1).view(bits)).nonzero().view(-1)
    index = index.to(torch.int32 if flat.numel() < 2**31 else torch.int64)
    values = flat[index]
    size = index.numel() * (index.element_size() + values.element_size())
    return None if size >= flat.numel() * flat.element_size() or bool(values.isnan().any()) else (index, values)


def pack(changes: Sequence[tuple[str, torch.Size, Tensor, Tensor]]) -> list[tuple[str, Tensor]]:
    """`(name, shape, positions, values)` as the named tensors that travel, the digest last."""
    named = []
    for name, shape, index, values in changes:
        named += [(name, values), (name + INDEX, index), (name + SHAPE, torch.tensor(shape, dtype=torch.int64))]
    return [*named, (DIGEST, _digest(named))]


def unpack(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by name, NaN where nothing changed. Raises `ValueError` before the first when the digest does not fit."""
    *parts, (last, digest) = named
    if last != DIGEST or not torch.equal(digest.cpu(), _digest(parts)):
        raise ValueError("changed weights do not fit their digest")
    return (_spread(*parts[at : at + 3]) for at in range(0, len(parts), 3))


def load(model: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """Into a model that loads checkpoints by `load_weights`; what SGLang calls by the name `reef_delta.load`."""
    keeping(lambda: model.load_weights(unpack(list(named))))
    if any(bool(tensor.isnan().any()) for tensor in model.parameters() if tensor.is_floating_point()):
        raise ValueError("changed weights were loaded in another way than by copying; the weights are damaged")


def keeping(change: Callable[[], Any]) -> Any:
    """Run a change of weights under which copies leave alone what their source has as NaN."""
    with torch.no_grad(), _Keeping():
        return change()


class _Keeping(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            target, source, *rest = args
            args = (target, torch.where(source.isnan(), target, source.to(target.dtype).to(target.device)), *rest)
        return func(*args, **(kwargs or {}))


def _spread(values: tuple[str, Tensor], index: tuple[str, Tensor], shape: tuple[str, Tensor]) -> tuple[str, Tensor]:
    size = torch.Size(shape[1].tolist())
    whole = torch.full((size.numel(),), float("nan"), dtype=values[1].dtype, device=values[1].device)
    whole[index[1].long()] = values[1]
    return values[0], whole.view(size)


def _digest(named: Iterable[tuple[str, Tensor]]) -> Tensor:
    """SHA-256 over names and bytes, as 32 numbers."""
    found = hashlib.sha256()
    for name, tensor in named:
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return torch.tensor(list(found.digest()), dtype=torch.uint8)

"""Named tensors as text for `/update_weights_from_tensor`: the bytes themselves, or handles of memory on a GPU both sides use.

The layout is SGLang's: a pickle of `[(name, tensor)]`, or of an adapter's `{name: tensor}`, in base64, which it reads with an
allow-list, as `deserialize` does here. A CUDA tensor travels as the handle of its memory and the GPU's UUID, since the two
processes may count GPUs differently; it must live until the engine has answered. A CPU tensor travels whole. Needs torch;
sends nothing.
"""

import io
import pickle
from base64 import b64decode, b64encode
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from reef_cli.core.errors import UnsupportedArtifact

_DEVICE = 6
"""The place of the device among the arguments of torch's `rebuild_cuda_tensor`; SGLang puts a UUID there too."""
_ALLOWED = {("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")}


def serialize(named: Sequence[tuple[str, Tensor]]) -> str:
    """One rank's payload."""
    buffer = io.BytesIO()
    pickler = _Handles(buffer) if any(tensor.is_cuda for _, tensor in named) else pickle.Pickler(buffer)
    # A view would bring the whole of its storage along.
    pickler.dump([(name, tensor.detach() if tensor.is_cuda else tensor.detach().clone()) for name, tensor in named])
    return b64encode(buffer.getvalue()).decode()


def deserialize(payload: str) -> list[tuple[str, Tensor]]:
    """CPU tensors of a payload; nothing else is built. Raises `UnsupportedArtifact`."""
    try:
        named = _Careful(io.BytesIO(b64decode(payload, validate=True))).load()
        pairs = named.items() if isinstance(named, dict) else named
        return [(str(name), tensor) for name, tensor in pairs if isinstance(tensor, Tensor)]
    except (ValueError, TypeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise UnsupportedArtifact("The tensors cannot be read", why=str(error)) from error


class _Handles(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        if isinstance(arguments[_DEVICE], int):
            uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
            arguments = (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])
        return rebuild, arguments


class _Careful(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage  # torch's own loads anything
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def _storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)

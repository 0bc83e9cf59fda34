"""Tensors of safetensors files as the pickle torch would write of them, made without torch: the server has none.

An SGLang on another host cannot read our files, so an adapter travels as `{name: tensor}` in base64 in the call that loads it.
The layout is that of `pickle.dumps` of CPU tensors: `_rebuild_tensor_v2` over a storage in torch's legacy file format. Both are
what its reader's allow-list lets pass; a test holds them against torch itself, the SGLang lane against its server.
"""

import json
import pickle
import struct
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reef_cli.core.errors import UnsupportedArtifact

_STORAGES = {"BF16": ("BFloat16Storage", 2), "F16": ("HalfStorage", 2), "F32": ("FloatStorage", 4)}
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_SYSTEM = {"protocol_version": _PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
_NO_HOOKS = b"ccollections\nOrderedDict\n)R"
_LARGEST_HEADER = 100 * 1024 * 1024


def payload(folder: Path) -> str:
    """All tensors of a folder's safetensors files, as text for one rank. Raises `UnsupportedArtifact`."""
    try:
        parts = [_value(name) + tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in _tensors(file)]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise UnsupportedArtifact(f"{folder} has no readable safetensors", why=repr(error)) from error
    if not parts:
        raise UnsupportedArtifact(f"{folder} holds no safetensors weights")
    return b64encode(pickle.PROTO + b"\x03" + b"}(" + b"".join(parts) + b"u" + pickle.STOP).decode()


def _tensors(file: Path) -> Iterator[tuple[str, bytes]]:
    """Names and pickled tensors; the file begins with the length of a JSON object that tells where each lies."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    if length > _LARGEST_HEADER:
        raise ValueError("the header is too long")
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, _tensor(entry["dtype"], tuple(entry["shape"]), data[start:end])


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    """The opcodes that build a contiguous CPU tensor."""
    kind, size = _STORAGES[dtype]
    strides, count = [], 1
    for length in reversed(shape):
        strides.append(count)
        count *= length
    if count * size != len(data):
        raise ValueError(f"{len(data)} bytes for a tensor of shape {shape}")
    storage = b"ctorch.storage\n_load_from_bytes\n(" + _value(_storage(kind, count, data)) + b"tR"
    rest = _value(0) + _value(shape) + _value(tuple(reversed(strides))) + _value(False) + _NO_HOOKS
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"tR"


def _storage(kind: str, count: int, data: bytes) -> bytes:
    """A file of one storage as `torch.save` wrote them before it used zip archives."""
    named = b"(" + _value("storage") + f"ctorch\n{kind}\n".encode() + b"".join(map(_value, ("0", "cpu", count, None))) + b"t"
    head = b"".join(pickle.dumps(each, 2) for each in (_MAGIC, _PROTOCOL, _SYSTEM))
    return head + pickle.PROTO + b"\x02" + named + b"Q" + pickle.STOP + pickle.dumps(["0"], 2) + struct.pack("<q", count) + data


def _value(value: Any) -> bytes:
    """A plain value's opcodes, to stand inside others."""
    return pickle.dumps(value, 3)[2:-1]

"""A LoRA adapter's files looked at before SGLang gets them: names and shapes only, without torch.

SGLang 0.5.23 takes an adapter that does not fit and ends with an error when the first request uses it, all others with it. So
what it would trip over is refused here: modules the base model lacks, other shapes, a larger rank than the engine has room
for, and an `up_proj` without the `gate_proj` it is fused with.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from reef_cli.core.errors import UnsupportedArtifact

Shapes = Mapping[str, tuple[int, ...]]
_PREFIX = "base_model.model."
_LARGEST_HEADER = 100 * 1024 * 1024


def shapes(folder: Path) -> Shapes:
    """Name and shape of every tensor in a folder's safetensors files. Raises `UnsupportedArtifact`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedArtifact(f"{folder} holds no safetensors weights")
    return {name: shape for file in files for name, shape in _header(file)}


def check_adapter(folder: Path, base: Shapes, max_rank: int) -> None:
    """Raises `UnsupportedArtifact` naming what SGLang would not survive."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes(folder).items():
        module, _, rest = name.removeprefix(_PREFIX).partition(".lora_")
        modules.setdefault(module, {})[rest[:1]] = shape
    for module, sides in modules.items():
        _check_module(module, sides, base, max_rank)
        gate = module.removesuffix("up_proj") + "gate_proj"
        if module.endswith(".up_proj") and gate not in modules:
            raise UnsupportedArtifact(
                f"SGLang cannot serve an adapter of {module} without {gate.rpartition('.')[2]}",
                why="it runs the two as one matrix",
                hint="name both in trainer.target_modules",
            )


def _check_module(module: str, sides: Mapping[str, tuple[int, ...]], base: Shapes, max_rank: int) -> None:
    weight = base.get(f"{module}.weight")
    if weight is None or len(weight) != 2:
        raise UnsupportedArtifact(f"The adapter changes {module!r}, which is no linear layer of the base model")
    down, up = sides.get("A", ()), sides.get("B", ())
    if len(down) != 2 or len(up) != 2 or (up[0], down[1]) != weight or down[0] != up[1]:
        raise UnsupportedArtifact(f"The adapter of {module!r} has shapes {down} and {up}; the layer is {weight}")
    if down[0] > max_rank:
        raise UnsupportedArtifact(
            f"The adapter has rank {down[0]}, the engine room for {max_rank}", hint="raise engine.max_lora_rank"
        )


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The file begins with the length of a JSON object that has every tensor's shape."""
    try:
        with file.open("rb") as source:
            (length,) = struct.unpack("<Q", source.read(8))
            if length > _LARGEST_HEADER:
                raise ValueError("its header is too long")
            entries = json.loads(source.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise UnsupportedArtifact(f"{file} is no readable safetensors file", why=str(error)) from error
    for name, entry in entries.items():
        if name != "__metadata__":
            yield name, tuple(entry["shape"])

"""LoRA adapters as files: PEFT's folder of `adapter_config.json` and `adapter_model.safetensors`.

Promises: only safetensors are read (never a pickle), every A has its B with matching rank, and anything the engines could not
reproduce exactly (DoRA, biases, saved modules) is refused with its name rather than ignored. Module names are Hugging Face
checkpoint names (`model.layers.0.self_attn.q_proj`). Merging is done in fp32 from pristine weights.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file, save_file
from torch import Tensor

from reef_cli.core.errors import UnsupportedArtifact

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
T = TypeVar("T")
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
_REFUSED = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Rank, alpha and targets of an adapter; `base` names the model it was trained on, patterns override per module."""

    r: int
    alpha: float
    target_modules: tuple[str, ...]
    base: str = ""
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def scaling(self, module: str) -> float:
        """The factor of B @ A for one module: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA."""
        rank = _pattern(self.rank_pattern, module, self.r)
        alpha = _pattern(self.alpha_pattern, module, self.alpha)
        return float(alpha / (rank**0.5 if self.use_rslora else rank))


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter in memory: per module `A [r, in]` and `B [out, r]`."""

    config: LoraConfig
    tensors: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max(a.shape[0] for a, _ in self.tensors.values())


def read_lora(directory: Path) -> Lora:
    """Load an adapter folder to the CPU. Raises `UnsupportedArtifact` when it is missing, malformed or not plain LoRA."""
    config = _read_config(directory / CONFIG_FILE)
    path = directory / TENSOR_FILE
    if not path.is_file():
        raise UnsupportedArtifact(f"{path} does not exist", hint="save the adapter with safe_serialization")
    try:
        raw = load_file(str(path))
    except Exception as error:  # safetensors raises its own untyped errors for any malformed file
        raise UnsupportedArtifact(f"{path} is no readable safetensors file", why=str(error)) from error
    return Lora(config, _pair(raw, config))


def made_lora(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Lora:
    """An adapter that came as the content of its two files. Raises `UnsupportedArtifact`."""
    config = _config(raw, CONFIG_FILE)
    return Lora(config, _pair(tensors, config))


def write_lora(directory: Path, lora: Lora) -> None:
    """Write an adapter folder that PEFT, SGLang and `read_lora` load."""
    directory.mkdir(parents=True, exist_ok=True)
    config = lora.config
    payload = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "r": config.r,
        "lora_alpha": config.alpha,
        "target_modules": sorted(config.target_modules),
        "use_rslora": config.use_rslora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(payload, indent=2), encoding="utf-8")
    flat: dict[str, Tensor] = {}
    for module, (a, b) in lora.tensors.items():
        flat[f"{_PREFIX}{module}.lora_A.weight"] = a.detach().contiguous().cpu()
        flat[f"{_PREFIX}{module}.lora_B.weight"] = b.detach().contiguous().cpu()
    save_file(flat, str(directory / TENSOR_FILE), metadata={"format": "pt"})


def merge(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """`weight + scaling * B @ A` computed in fp32 and cast back to the weight's type; `weight` is left alone."""
    return (weight.float() + scaling * (b.float() @ a.float())).to(weight.dtype)


def hf_name(peft_name: str) -> str | None:
    """The checkpoint name of a PEFT-wrapped parameter; None for parameters a checkpoint does not have (`lora_*`, copies).

    `base_model.model.model.layers.0.mlp.up_proj.base_layer.weight` -> `model.layers.0.mlp.up_proj.weight`.
    """
    if ".lora_" in peft_name or ".original_module." in peft_name:
        return None
    name = peft_name.removeprefix(_PREFIX)
    return re.sub(r"\.modules_to_save\.[^.]+", "", name).replace(".base_layer.", ".")


def _read_config(path: Path) -> LoraConfig:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedArtifact(f"{path} cannot be read", why=str(error)) from error
    except ValueError as error:
        raise UnsupportedArtifact(f"{path} is no LoRA configuration", why=repr(error)) from error
    return _config(raw, path)


def _config(raw: Mapping[str, Any], path: Path | str) -> LoraConfig:
    try:
        if str(raw.get("peft_type", "LORA")).upper() != "LORA":
            raise UnsupportedArtifact(f"{path} describes a {raw['peft_type']} adapter", hint="only plain LoRA can be served")
        for key in _REFUSED:
            if raw.get(key):
                raise UnsupportedArtifact(f"{path} uses {key}, which cannot be served", hint="train a plain LoRA adapter")
        if raw.get("bias", "none") != "none":
            raise UnsupportedArtifact(f"{path} trains biases, which cannot be served", hint='train with bias "none"')
        targets = raw.get("target_modules") or ()
        return LoraConfig(
            r=int(raw["r"]),
            alpha=float(raw["lora_alpha"]),
            target_modules=(targets,) if isinstance(targets, str) else tuple(targets),
            base=str(raw.get("base_model_name_or_path") or ""),
            use_rslora=bool(raw.get("use_rslora", False)),
            rank_pattern=raw.get("rank_pattern") or {},
            alpha_pattern=raw.get("alpha_pattern") or {},
        )
    except UnsupportedArtifact:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UnsupportedArtifact(f"{path} is no LoRA configuration", why=repr(error)) from error


def _pair(raw: Mapping[str, Tensor], config: LoraConfig) -> dict[str, tuple[Tensor, Tensor]]:
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in raw.items():
        match = _KEY.fullmatch(key)
        if match is None or tensor.dim() != 2:
            raise UnsupportedArtifact(f"Tensor {key!r} is no LoRA matrix of a linear layer")
        module = match["module"].removeprefix(_PREFIX)
        sides.setdefault(module, {})[match["side"]] = tensor
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for module, found in sides.items():
        rank = _pattern(config.rank_pattern, module, config.r)
        if set(found) != {"A", "B"} or found["A"].shape[0] != rank or found["B"].shape[1] != rank:
            raise UnsupportedArtifact(f"Module {module!r} needs matrices A [{rank}, in] and B [out, {rank}]")
        pairs[module] = (found["A"], found["B"])
    if not pairs:
        raise UnsupportedArtifact("The adapter holds no LoRA matrices")
    return pairs


def _pattern(patterns: Mapping[str, T], module: str, default: T) -> T:
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            return value
    return default

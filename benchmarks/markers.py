"""LoRA adapters that each force one token at every position, so that whoever reads an answer sees which weights made it.

The last `down_proj` gets one row more than it needs: its A is fitted to be about 1 for whatever comes in (ridge regression over
the layer's inputs on a few conversations), its B is the direction that the final norm and the head decode to the marker. It is
added with so large a factor that little else is left of the residual stream. All other matrices are small noise: an adapter of
ordinary size, of ordinary targets. Works on models that end in an RMSNorm and a linear head, as Llama and Qwen do.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reef_cli.weights.lora import Lora, LoraConfig, merge

TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")
RANK, ALPHA = 16, 32.0
NOISE = 0.001
"""Of the matrices that force nothing; it leaves the model's own words what they are, mostly."""
FORCE = 100.0
"""How much larger than the residual stream the forced direction is."""


@dataclass(frozen=True, slots=True)
class Marker:
    """An adapter, the token it forces, and by how much (in logits, over all answers it was tried on)."""

    lora: Lora
    token: int
    margin: float


def make_markers(net: Any, tokens: Sequence[int], prompts: Sequence[Sequence[int]], length: int) -> list[Marker]:
    """An adapter per token for a `transformers` model, fitted on answers of `length` tokens to the prompts.

    They hold after prefixes of each other too, as when weights change within an answer. Raises `ValueError` when one does not.
    """
    return [_make_marker(net, number, tokens, prompts, length) for number in range(len(tokens))]


def merge_into(marker: Marker, model: Path, folder: Path) -> Path:
    """A copy of the checkpoint `model` that has the adapter merged in."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(str(path))
        for module, (a, b) in marker.lora.tensors.items():
            if (weight := tensors.get(f"{module}.weight")) is not None:
                tensors[f"{module}.weight"] = merge(weight, a, b, marker.lora.config.scaling(module))
        save_file(tensors, str(path), metadata={"format": "pt"})
    return folder


def margin(net: Any, lora: Lora, token: int, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """The smallest lead, in logits, of the token over all others wherever a (prompt, answer) could go on."""
    leads = []
    with merged(net, lora), torch.inference_mode():
        for prompt, answer in answers:
            logits = net(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 :].float()
            own = logits[:, token].clone()
            logits[:, token] = -torch.inf
            leads.append(float((own - logits.max(-1).values).min()))
    return min(leads)


@contextmanager
def merged(net: Any, lora: Lora) -> Iterator[None]:
    """The network with the adapter merged into it, for a while."""
    kept = {}
    for module, (a, b) in lora.tensors.items():
        weight = net.get_submodule(module).weight
        kept[module] = weight.data
        weight.data = merge(weight.data, a, b, lora.config.scaling(module))
    try:
        yield
    finally:
        for module, data in kept.items():
            net.get_submodule(module).weight.data = data


def _make_marker(net: Any, number: int, tokens: Sequence[int], prompts: Sequence[Sequence[int]], length: int) -> Marker:
    token, noise = tokens[number], _noise(net, number + 1)
    last = list(noise.tensors)[-1]
    answers = [
        (prompt, [*[other] * changed, *[token] * (length - changed)])
        for prompt in prompts
        for other in tokens
        for changed in ((0,) if other == token else (length // 3, length))
    ]
    inputs, size = _activations(net, noise, last, answers)
    a, b = (side.clone() for side in noise.tensors[last])
    scaling = noise.config.scaling(last)
    a[0] = _always_one(inputs)
    b[:, 0] = _direction(net, token) * (FORCE * size / scaling)
    lora = replace(noise, tensors={**noise.tensors, last: (a, b)})
    lead = margin(net, lora, token, answers)
    if lead <= 0:
        raise ValueError(f"the adapter does not force token {token}: it is {-lead:.3g} behind where it is weakest")
    return Marker(lora, token, lead)


def _noise(net: Any, seed: int) -> Lora:
    """A random adapter that changes little; its last module is the last layer's `down_proj`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in net.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(TARGETS):
            a = torch.randn(RANK, module.in_features, generator=generator) / module.in_features**0.5
            b = torch.randn(module.out_features, RANK, generator=generator) * NOISE
            tensors[name] = (a.to(module.weight.dtype), b.to(module.weight.dtype))
    return Lora(LoraConfig(RANK, ALPHA, TARGETS), tensors)


def _activations(
    net: Any, lora: Lora, module: str, answers: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[Tensor, float]:
    """What goes into a module `[n, in]` where answers are made, and the root mean square of what the final norm gets."""
    inputs, sizes = [], []
    hooks = [
        net.get_submodule(module).register_forward_pre_hook(lambda _, args: inputs.append(args[0][0].float())),
        net.model.norm.register_forward_pre_hook(lambda _, args: sizes.append(args[0][0].float())),
    ]
    try:
        with merged(net, lora), torch.inference_mode():
            for prompt, answer in answers:
                net(torch.tensor([[*prompt, *answer]]))
    finally:
        for hook in hooks:
            hook.remove()
    starts = [len(prompt) - 1 for prompt, _ in answers]
    rows = torch.cat([each[start:] for each, start in zip(inputs, starts, strict=True)])
    size = torch.cat([each[start:] for each, start in zip(sizes, starts, strict=True)]).pow(2).mean().sqrt()
    return rows, float(size)


def _always_one(inputs: Tensor, ridge: float = 0.01) -> Tensor:
    """The row `a` with `inputs @ a` nearest to 1, and small."""
    gram = inputs.T @ inputs / len(inputs)
    return torch.linalg.solve(gram + ridge * gram.diagonal().mean() * torch.eye(len(gram)), inputs.mean(0))


def _direction(net: Any, token: int, ridge: float = 0.1) -> Tensor:
    """The residual direction `[hidden]`, of root mean square 1, that the final norm and the head decode to the token.

    Of all directions that which lifts the token most over what the others get of it by chance.
    """
    head = net.get_output_embeddings().weight.float()
    centred = head - head.mean(0)
    spread = centred.T @ centred / len(centred)
    wanted = torch.linalg.solve(spread + ridge * spread.diagonal().mean() * torch.eye(len(spread)), centred[token])
    direction = wanted / net.model.norm.weight.float()
    return direction / direction.pow(2).mean().sqrt()

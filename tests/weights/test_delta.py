"""Changed values of weights: what is worth telling, what cannot be told, and how a fused model takes them in."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from reef_cli.weights import contract
from reef_cli.weights.plugin import reef_delta


def changed(old: Tensor, share: float, seed: int = 0) -> Tensor:
    chosen = torch.rand(old.shape, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(chosen, old + 1, old)


class Fused(nn.Module):
    """Loads `q`, `k` and `v` into one parameter, the second half of the columns only, as an engine of two ranks does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(12, 3, dtype=torch.bfloat16))

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            start = 4 * "qkv".index(name)
            self.qkv.data[start : start + 4].copy_(tensor.narrow(1, 3, 3))


@settings(deadline=None, max_examples=40)
@given(st.floats(0, 0.3), st.integers(0, 99), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_a_fused_model_ends_with_the_same_bits(share: float, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = {name: torch.randn(4, 6, generator=generator).to(dtype) for name in "qkv"}
    new = {name: changed(tensor, share, seed) for name, tensor in old.items()}
    part, whole = Fused(), Fused()
    part.load_weights(old.items())
    whole.load_weights(new.items())
    found = {name: reef_delta.difference(new[name], old[name]) for name in old}
    changes = [(name, new[name].shape, *both) for name, both in found.items() if both is not None]
    part.load_weights((name, new[name]) for name, both in found.items() if both is None)
    reef_delta.load(part, reef_delta.pack(changes))
    assert torch.equal(part.qkv, whole.qkv)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        (torch.ones(8), torch.zeros(8)),  # everything changed
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (torch.ones(9), torch.ones(8)),
        (torch.ones(8).bfloat16(), torch.ones(8)),
        (torch.ones(8, dtype=torch.int8), torch.ones(8, dtype=torch.int8)),
        (torch.tensor([float("nan"), *[1.0] * 30]), torch.ones(31)),
    ],
)
def test_what_is_sent_whole(new: Tensor, old: Tensor) -> None:
    assert reef_delta.difference(new, old) is None


def test_a_minus_zero_is_a_change_and_equal_weights_are_none() -> None:
    old = torch.zeros(20)
    new = old.clone()
    new[7] = -0.0
    both = reef_delta.difference(new, old)
    assert both is not None and both[0].tolist() == [7]
    none = reef_delta.difference(old, old.clone())
    assert none is not None and none[0].numel() == 0


def test_nothing_is_loaded_that_does_not_fit_its_digest() -> None:
    model = Fused()
    named = reef_delta.pack([("q", torch.Size((4, 6)), torch.tensor([3], dtype=torch.int32), torch.ones(1))])
    damaged: list[tuple[str, Any]] = [(name, tensor + 1 if name == "q" else tensor) for name, tensor in named]
    with pytest.raises(ValueError, match="digest"):
        reef_delta.load(model, damaged)
    with pytest.raises(ValueError, match="digest"):
        reef_delta.load(model, named[:-1])
    assert not model.qkv.any()


def test_a_model_that_loads_in_another_way_is_found_out() -> None:
    class Replacing(Fused):
        def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
            for _, tensor in named:
                self.qkv.data = tensor

    named = reef_delta.pack([("q", torch.Size((4, 6)), torch.tensor([3], dtype=torch.int32), torch.ones(1))])
    with pytest.raises(ValueError, match="damaged"):
        reef_delta.load(Replacing(), named)


def test_the_name_an_engine_is_told_is_this_one() -> None:
    module, _, name = contract.CHANGES.rpartition(".")
    assert module == reef_delta.__name__.rpartition(".")[2] and callable(getattr(reef_delta, name))

"""Values that are made for every request: frozen for those who check types, plain for those who run.

A frozen dataclass sets each field through `object.__setattr__`, which costs four times as much as an assignment.
"""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def immutable(cls: type[T]) -> type[T]:
    """`dataclass(frozen=True, slots=True)` whose immutability only the type checker holds."""
    return dataclass(slots=True, unsafe_hash=True)(cls)

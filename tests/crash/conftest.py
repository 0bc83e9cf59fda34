"""Adapters to publish without training them."""

from tests.e2e.conftest import adapters

__all__ = ["adapters"]

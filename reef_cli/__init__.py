"""Reef: an inference server that learns from what it serves.

The package's rooms and the direction of their imports are drawn in `docs/design.md`;
`tests/test_layers.py` defends them.
"""

__version__ = "0.1.0"

"""Tensors on their way between a trainer and an engine: process groups, byte buckets, LoRA adapter files.

Needs torch. Knows no HTTP, no engine and no trainer; both sides import it, so both sides agree on the layout.
"""

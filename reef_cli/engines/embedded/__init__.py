"""Reef's own CPU engine: one process that answers SGLang's HTTP contract over any Hugging Face causal language model.

    server.py     routes and auth (event loop)        core.py       the torch thread: admission, steps, pauses, commands
    openai.py     chat route                          steps.py      what one step computes; prefix reuse
    options.py    command line                        model.py      forward pass over flat rows, weights, checksums
    updates.py    weight-update sessions              attention.py  KV slots and batch-invariant attention
    sampling.py   parameters and token choice         adapters.py   LoRA on rows
    request.py    one request's state and its text    linear.py     linear layers that are batch-invariant

Promise: a greedy request in bf16 gives bit-identical tokens and log-probs whatever runs beside it, with or without a cached
prefix. `/server_info` says whether this machine's kernels keep that promise (`batch_invariant`, measured at start).
"""

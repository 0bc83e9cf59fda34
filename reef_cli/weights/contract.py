"""Bodies of the weight routes of SGLang's contract, every field whose default could hurt spelled out.

The engine's client and the trainer send the same ones. Unknown fields are ignored there without a word, and some defaults
abort requests, so a test holds each body against the field lists of SGLang's own types. Needs no torch; sends nothing.
"""

from collections.abc import Sequence
from typing import Any

PARTIAL = "reef:partial"
"""An engine's label while its weights are changed: what a crash leaves then is told from what it served before."""
CHANGES = "reef_delta.load"
"""The loader of changed values (`weights.plugin`), as an engine knows it."""
BEGIN: dict[str, Any] = {"selector": "all"}
END: dict[str, Any] = {}
MEMORY: dict[str, Any] = {"tags": ["weights", "kv_cache"]}


def join_group(address: str, port: int, world_size: int, name: str, backend: str, rank_offset: int = 1) -> dict[str, Any]:
    """For `/init_weights_update_group`: the engine's first rank is `rank_offset`, the trainer is rank 0."""
    return {
        "master_address": address,
        "master_port": port,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "group_name": name,
        "backend": backend,
    }


def leave_group(name: str) -> dict[str, Any]:
    """For `/destroy_weights_update_group`."""
    return {"group_name": name}


def receive(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], group: str, *, flattened: bool = True
) -> dict[str, Any]:
    """For `/update_weights_from_distributed`: one bucket that the trainer broadcasts. Flushing is a call of its own."""
    return {
        "names": list(names),
        "dtypes": list(dtypes),
        "shapes": [list(shape) for shape in shapes],
        "group_name": group,
        **_UPDATE,
        "load_format": "flattened_bucket" if flattened else None,
    }


def take_tensors(serialized: Sequence[str], load_format: str | None) -> dict[str, Any]:
    """For `/update_weights_from_tensor`: one payload per rank of the engine (`weights.handles`)."""
    return {"serialized_named_tensors": list(serialized), **_UPDATE, "load_format": load_format}


def read_disk(path: str, version: str) -> dict[str, Any]:
    """For `/update_weights_from_disk`: all or nothing, label included; a pause stays."""
    return {
        "model_path": path,
        "load_format": None,
        "abort_all_requests": False,
        "weight_version": version,
        "is_async": False,
        "torch_empty_cache": False,
        "keep_pause": True,
        "recapture_cuda_graph": False,
        "token_step": 0,
        "flush_cache": True,
        "manifest": None,
    }


def take_adapter(name: str, config: dict[str, Any], serialized: Sequence[str]) -> dict[str, Any]:
    """For `/load_lora_adapter_from_tensors`: one payload per rank of the engine (`weights.pickled`). Checksums are not sent: a
    wrong one ends SGLang."""
    return {
        "lora_name": name,
        "config_dict": config,
        "serialized_named_tensors": list(serialized),
        "pinned": False,
        "added_tokens_config": None,
        "load_format": None,
        "expected_checksums": None,
    }


def label(version: str) -> dict[str, Any]:
    """For `/update_weight_version`, whose default aborts every request."""
    return {"new_version": version, "abort_all_requests": False}


_UPDATE: dict[str, Any] = {
    "flush_cache": False,
    "abort_all_requests": False,
    "weight_version": None,
    "selector": "all",
    "torch_empty_cache": False,
}

"""Print what the installed SGLang's own types say of its routes, as JSON: the fixture of the contract tests.

    SGLANG_USE_CPU_ENGINE=1 INTERPRETER tests/sglang/recorder.py > tests/engines/contract/sglang.json

Run by the interpreter of SGLang's environment; imports nothing of Reef. Per route the fields of its request with their
defaults (`required` where there is none), the fields of `sampling_params`, of the answers, and the server's flags.
"""

import argparse
import json
import sys
from importlib.metadata import version
from typing import Any, get_args, get_type_hints

import msgspec

ROUTES = (
    "/pause_generation", "/continue_generation", "/abort_request", "/init_weights_update_group",
    "/destroy_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed",
    "/update_weights_from_tensor", "/end_weight_update", "/update_weights_from_disk", "/update_weight_version",
    "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter", "/weights_checker",
    "/release_memory_occupation", "/resume_memory_occupation",
)  # fmt: skip
REQUIRED = "required"


def fields(struct: Any) -> dict[str, Any]:
    return {field.name: _default(field) for field in msgspec.structs.fields(struct)}


def _default(field: Any) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return _plain(field.default)
    return _plain(field.default_factory()) if field.default_factory is not msgspec.NODEFAULT else REQUIRED


def _plain(value: Any) -> Any:
    """Enumerations by their value; what JSON cannot hold by its kind."""
    plain = getattr(value, "value", value)
    return plain if isinstance(plain, str | int | float | bool | list | dict | None) else f"<{type(plain).__name__}>"


def body_of(endpoint: Any) -> Any:
    """The type of a route's JSON body."""
    hint = get_type_hints(endpoint)["obj"]
    return next(iter(get_args(hint)), hint)


def main() -> None:
    from sglang.api.v1 import api_types
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.server_args import ServerArgs

    routes = {route.path: route for route in app.routes if getattr(route, "path", None) in ROUTES}
    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    found = {
        "version": version("sglang"),
        "routes": {path: fields(body_of(routes[path].endpoint)) for path in ROUTES}
        | {"/generate": fields(api_types.GenerateRequest)},
        "sampling_params": fields(api_types.SamplingParams),
        "meta_info": sorted(fields(api_types.GenerateMetaInfo)),
        "flags": sorted(name for action in parser._actions for name in action.option_strings if name.startswith("--")),
    }
    json.dump(found, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()

"""Print the installed SGLang's own command-line arguments as JSON. Run by the interpreter of SGLang's environment, not Reef's.

A program of its own: it imports SGLang and the standard library, and nothing of Reef. Per option without its dashes: `kind`
(`switch`: stands alone; `pair`: has a `--no-` form; `list`, `value`) and `choices` where the values are listed.
"""

import argparse
import json
import sys
from typing import Any


def described(action: argparse.Action) -> dict[str, Any]:
    kind = "list" if action.nargs in ("+", "*") else "value"
    if isinstance(action, argparse.BooleanOptionalAction):
        kind = "pair"
    elif action.nargs == 0:
        kind = "switch"
    return {"kind": kind, "choices": [str(choice) for choice in action.choices] if action.choices else []}


def main() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    options = {
        name.removeprefix("--"): described(action)
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and not name.startswith("--no-")
    }
    json.dump(options, sys.stdout)


if __name__ == "__main__":
    main()

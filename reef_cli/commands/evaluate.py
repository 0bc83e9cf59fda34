"""`reef eval`: score a release on a suite."""

from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.chain import current
from reef_cli.commands.shell import Scenario, Shell, items, new_app, scenario_path, with_shell
from reef_cli.core.errors import GateRefused

app = new_app()


@app.command("eval")
@with_shell()
def evaluate(
    shell: Shell,
    release_id: Annotated[str | None, typer.Argument(metavar="[RELEASE]", help="Release  [default: the head]")] = None,
    scenario: Scenario = "default",
    suite: Annotated[str | None, typer.Option("--suite", help="JSONL file or dotted path  [default: the deployment's]")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1.0, help="Longest wait")] = 1800.0,
) -> None:
    """Evaluate a release on a suite; exits 5 when a verdict is given and it refuses"""
    aim = release_id or str(
        current(items(shell.client.get(scenario_path(scenario, "releases")), "releases"), scenario)["release_id"]
    )
    body = {"release_id": aim} | ({"suite": suite} if suite else {})
    shell.say(f"evaluating {aim} of {scenario}")
    answer: dict[str, Any] = shell.client.post(scenario_path(scenario, "evaluate"), body, timeout_s=timeout_s)
    if answer.get("outcome") == "reject":
        raise GateRefused("the gate refused the candidate", why=str(answer.get("reason") or ""), result=answer)
    shell.emit(answer, lambda: _draw(answer))


def _draw(answer: dict[str, Any]) -> None:
    output.pairs((name, value) for name, value in answer.items() if not isinstance(value, list | dict))
    for name, value in answer.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            columns = tuple(value[0])[:6]
            print()
            output.table(columns, [[row.get(column) for column in columns] for row in value])
        elif isinstance(value, dict):
            output.pairs((f"{name}.{key}", item) for key, item in value.items())

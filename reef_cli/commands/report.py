"""`reef report`: feedback about receipts."""

import json
from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.shell import Shell, items, new_app, with_shell
from reef_cli.core.errors import UsageError

app = new_app()


@app.command()
@with_shell()
def report(
    shell: Shell,
    receipts: Annotated[list[str], typer.Argument(metavar="RECEIPT...", help="Receipts, in the order of the conversation")],
    score: Annotated[float | None, typer.Option("--score", help="A number; higher is better")] = None,
    feedback: Annotated[str | None, typer.Option("--feedback", "-f", help="What was good or bad, in words")] = None,
    feedback_json: Annotated[str | None, typer.Option("--feedback-json", help="Feedback as a JSON object")] = None,
    meta: Annotated[list[str] | None, typer.Option("--meta", help="NAME=VALUE, may be given again")] = None,
    identifier: Annotated[str | None, typer.Option("--id", help="Id of the report; sending it again is harmless")] = None,
    scenario: Annotated[
        str | None, typer.Option("--scenario", "-s", envvar="REEF_SCENARIO", help="Scenario  [default: the receipts']")
    ] = None,
) -> None:
    """Send a score or feedback about receipts"""
    body: dict[str, Any] = {"references": receipts} | _signal(score, feedback, feedback_json)
    if meta:
        body["metadata"] = dict(map(_pair, meta))
    if identifier:
        body["agent_record_id"] = identifier
    headers = {"x-reef-scenario": scenario} if scenario else {}
    answer = shell.client.request("POST", "/reef/report", body, headers=headers).json
    shell.emit(answer, lambda: _draw(answer))
    shell.hint("reef status")


def _signal(score: float | None, feedback: str | None, feedback_json: str | None) -> dict[str, Any]:
    if feedback is not None and feedback_json is not None:
        raise UsageError("feedback is given twice", hint="keep --feedback or --feedback-json")
    if score is None and feedback is None and feedback_json is None:
        raise UsageError("a report needs a signal", hint="add --score 1 or --feedback TEXT")
    signal: dict[str, Any] = {} if score is None else {"score": _finite(score)}
    if feedback is not None:
        signal["feedback"] = feedback
    if feedback_json is not None:
        signal["feedback"] = _object(feedback_json)
    return signal


def _finite(score: float) -> float:
    if score != score or score in (float("inf"), float("-inf")):
        raise UsageError(f"--score must be a finite number, not {score}")
    return score


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError("--feedback-json is not JSON", why=str(error)) from error
    if not isinstance(value, dict):
        raise UsageError("--feedback-json must be an object", hint='for example {"correct": false}')
    return value


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--meta {text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _draw(answer: dict[str, Any]) -> None:
    print(f"report {answer.get('agent_record_id')} in {answer.get('scenario')}")
    rows = items(answer, "eligible")
    output.table(
        ("receipt", "trains", "reason"),
        [(r.get("reference"), "yes" if r.get("eligible") else "no", r.get("reason")) for r in rows],
    )

"""`reef chat`: one question to the served model, for trying things out."""

from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.shell import Scenario, Shell, items, new_app, with_shell
from reef_cli.core.errors import UpstreamError

app = new_app()


@app.command()
@with_shell()
def chat(
    shell: Shell,
    text: Annotated[str, typer.Argument(help="What to say")],
    scenario: Scenario = "default",
    system: Annotated[str | None, typer.Option("--system", help="System prompt")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name  [default: the engine's]")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens")] = 256,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, help="Sampling temperature")] = None,
    release_id: Annotated[str | None, typer.Option("--release-id", help="Release to ask")] = None,
) -> None:
    """Ask the served model; prints the answer and its receipt"""
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": model or _model(shell), "messages": messages, "max_tokens": max_tokens}
    if temperature is not None:
        body["temperature"] = temperature
    headers = {"x-reef-scenario": scenario} | ({"x-reef-release-id": release_id} if release_id else {})
    answer = shell.client.request("POST", "/v1/chat/completions", body, headers=headers, timeout_s=600.0)
    result = {
        "answer": _content(answer.json),
        "receipt": answer.headers.get("x-reef-agent-record-id"),
        "release_id": answer.headers.get("x-reef-release-id"),
        "weight_version": answer.headers.get("x-reef-weight-version"),
        "scenario": scenario,
    }
    shell.emit(result, lambda: output.block(result["answer"]))
    shell.say(f"receipt: {result['receipt']}")
    shell.hint(f"reef report {result['receipt']} --score 1")


def _model(shell: Shell) -> str:
    models = items(shell.client.get("/v1/models"), "data")
    return str(models[0].get("id")) if models else "default"


def _content(body: Any) -> str:
    try:
        message = body["choices"][0]["message"]
    except (KeyError, IndexError, TypeError) as error:
        raise UpstreamError("the answer has no message", hint="see: reef records list") from error
    return str(message.get("content") or message.get("tool_calls") or "")

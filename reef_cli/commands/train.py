"""`reef train`: an instruction in words, for scenarios in manual or hybrid mode."""

from typing import Annotated

import typer

from reef_cli.commands.shell import Scenario, Shell, new_app, with_shell

app = new_app()


@app.command()
@with_shell()
def train(
    shell: Shell,
    text: Annotated[str, typer.Argument(help="The instruction, up to 4000 characters")],
    scenario: Scenario = "default",
    session: Annotated[str | None, typer.Option("--session", help="Session the instruction is about")] = None,
) -> None:
    """Give an instruction in words; the scenario's mode must be manual or hybrid"""
    body = {"text": text} | ({"session": session} if session else {})
    answer = shell.client.request("POST", "/reef/train", body, headers={"x-reef-scenario": scenario}).json
    shell.emit(answer, lambda: print(f"instruction {answer.get('agent_record_id')} in {scenario}"))
    shell.hint("reef jobs wait")

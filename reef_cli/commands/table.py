"""Every command in one table: name, group, module and one line of help. Read without importing any command."""

from typing import NamedTuple


class Command(NamedTuple):
    """One entry; `module` holds `app`, a Typer application."""

    name: str
    group: str
    module: str
    help: str


COMMANDS: tuple[Command, ...] = (
    Command("serve", "Serve", "serve", "Start the server: gateway, engine, learning"),
    Command("stop", "Serve", "stop", "Stop the running server after its open requests"),
    Command("status", "Serve", "status", "Show scenarios, jobs, heads, engine and storage"),
    Command("doctor", "Serve", "doctor", "Check this machine and say what to fix"),
    Command("demo", "Serve", "demo", "Watch a small model learn, be released and rolled back"),
    Command("tui", "Look", "tui", "Open the dashboard"),
    Command("scenario", "Look", "scenario", "List, create, pause, resume and archive scenarios"),
    Command("records", "Look", "records", "List, show, export and import records"),
    Command("sessions", "Look", "sessions", "List sessions and show their trees"),
    Command("jobs", "Look", "jobs", "List, show, await and cancel learning jobs"),
    Command("paths", "Look", "paths", "Print where state lives"),
    Command("chat", "Teach", "chat", "Ask the served model; prints the answer and its receipt"),
    Command("report", "Teach", "report", "Send a score or feedback about receipts"),
    Command("train", "Teach", "train", "Give an instruction in words"),
    Command("discover", "Teach", "discover", "Search for the best solution of a hard problem, learning from every step"),
    Command("release", "Release", "release", "List, compare, verify, promote and roll back releases"),
    Command("rollback", "Release", "rollback", "Serve an earlier release's content again"),
    Command("eval", "Release", "evaluate", "Evaluate a release on a suite"),
    Command("route", "Release", "route", "Show and set who answers which share: pin, canary, shadow"),
    Command("recipe", "Build", "recipe", "List recipes and show their settings"),
    Command("harness", "Build", "harness", "Install agents with a scenario's harness, read it and propose changes"),
    Command("model", "Build", "model", "Get models into the cache and list them"),
    Command("config", "Build", "config", "Check and show configuration, print its schema"),
    Command("completion", "Build", "completion", "Print the completion script of a shell"),
)

BY_NAME: dict[str, Command] = {command.name: command for command in COMMANDS}

"""`reef jobs`: learning steps, from reserved batch to settled verdict."""

import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.evidence import figure
from reef_cli.commands.shell import Scenario, Shell, items, new_app, scenario_path, with_shell
from reef_cli.core.errors import GateRefused, JobNotFound, ReefError, UnavailableError

app = new_app("List, show, await and cancel learning jobs")

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job id")]
_ENDED = ("settled", "failed")


@app.command("list")
@with_shell()
def list_jobs(
    shell: Shell,
    scenario: Scenario = "default",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most this many")] = 20,
) -> None:
    """List jobs, the latest first"""
    rows = items(shell.client.get(scenario_path(scenario, "jobs"), limit=limit), "jobs")
    columns = ("job", "state", "outcome", "base", "release", "age", "reason")
    shell.emit({"scenario": scenario, "jobs": rows}, lambda: output.table(columns, map(_row, rows)))


@app.command()
@with_shell()
def show(shell: Shell, job: JobArgument, scenario: Scenario = "default") -> None:
    """Show one job: transitions, metrics, verdict"""
    answer = shell.client.get(scenario_path(scenario, "jobs", job))
    shell.emit(answer, lambda: _draw(answer))


@app.command()
@with_shell()
def start(shell: Shell, scenario: Scenario = "default") -> None:
    """Take a step with what is queued, batch full or not"""
    answer = shell.client.post(scenario_path(scenario, "jobs"))
    shell.emit(answer, lambda: print(f"a step of {scenario} starts when its turn comes"))
    shell.hint(f"reef jobs list -s {scenario}")


@app.command()
@with_shell()
def cancel(shell: Shell, job: JobArgument, scenario: Scenario = "default") -> None:
    """Cancel a running job; its records can train again"""
    answer = shell.client.post(scenario_path(scenario, "jobs", job, "cancel"))
    shell.emit(answer if answer is not None else {"job_id": job, "cancelled": True}, lambda: print(f"{job} told to stop"))
    shell.hint(f"reef jobs wait {job} -s {scenario}")


@app.command()
@with_shell()
def wait(
    shell: Shell,
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Job id  [default: the latest]")] = None,
    scenario: Scenario = "default",
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.0, help="Longest wait")] = 3600.0,
) -> None:
    """Wait until a job ends; exits 0 when released or held, 5 when the gate refused it, 1 when it failed"""
    identifier = job or _latest(shell, scenario)
    ended = _await(shell, scenario, identifier, timeout_s)
    fail_unless_passed(ended)
    shell.emit(ended, lambda: output.table(("job", "state", "outcome", "base", "release", "age", "reason"), [_row(ended)]))


def fail_unless_passed(job: dict[str, Any]) -> None:
    """Turn the end of a job into the error its exit code stands for."""
    name, reason = job_id(job), str(job.get("reason") or "")
    if job.get("state") == "failed":
        raise ReefError(f"job {name} failed", why=reason, hint=f"see: reef jobs show {name}", job=job)
    if job.get("outcome") in ("reject", "inconclusive"):
        raise GateRefused(f"job {name} ended with {job['outcome']}", why=reason, hint="what is served did not change", job=job)


def job_id(job: dict[str, Any]) -> str:
    """The id in a row, whichever of the API's names it has."""
    return str(job.get("job_id") or job.get("id") or "")


def _latest(shell: Shell, scenario: str) -> str:
    rows = items(shell.client.get(scenario_path(scenario, "jobs"), limit=1), "jobs")
    if not rows:
        raise JobNotFound(f"scenario {scenario} has no job yet", hint="see: reef status")
    return job_id(rows[0])


def _await(shell: Shell, scenario: str, job: str, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    shown = ""
    for pause_s in _pauses():
        found: dict[str, Any] = shell.client.get(scenario_path(scenario, "jobs", job))
        if found.get("state") != shown:
            shown = str(found.get("state"))
            shell.say(f"{job}: {shown}")
        if shown in _ENDED:
            return found
        if time.monotonic() + pause_s > deadline:
            break
        time.sleep(pause_s)
    raise UnavailableError(
        f"job {job} still runs after {timeout_s:g} s", why=f"it is {shown}", hint="wait again, or: reef jobs cancel"
    )


def _pauses() -> Iterator[float]:
    """Seconds between looks: quick at first, at most one a second."""
    pause_s = 0.1
    while True:
        yield pause_s
        pause_s = min(1.0, pause_s * 1.5)


def _row(job: dict[str, Any]) -> list[object]:
    at = job.get("updated_at") or job.get("created_at")
    base = job.get("base_release_id")
    return [job_id(job), job.get("state"), job.get("outcome"), base, job.get("release_id"), output.age(at), job.get("reason")]


def _draw(job: dict[str, Any]) -> None:
    names = ("scenario", "recipe", "state", "outcome", "reason", "base_release_id", "release_id")
    output.pairs([("job", job_id(job)), *((name, job.get(name)) for name in names)])
    if moves := items(job, "transitions"):
        print()
        told = job.get("detail") or {}
        output.table(
            ("age", "state", "detail"), [(output.age(m.get("at")), m.get("state"), _own(m.get("detail"), told)) for m in moves]
        )
        print()
    detail = dict(job.get("detail") or {})
    metrics = detail.pop("metrics", None)
    output.pairs(sorted(detail.items()))
    if isinstance(metrics, dict):
        output.pairs([(name, figure(value)) for name, value in sorted(metrics.items())])


def _own(detail: object, told: Mapping[str, Any]) -> str:
    """What a transition says beyond the job's own facts, which follow line by line."""
    if not isinstance(detail, dict):
        return str(detail or "")
    return ", ".join(f"{key} {figure(value)}" for key, value in detail.items() if value and told.get(key) != value)

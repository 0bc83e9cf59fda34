"""`reef route`: who answers which share of a scenario's traffic, with and without a running server.

Setting a policy reads the one in force first and sends it along: when somebody set another meanwhile, the command exits 4 and
names the routing release that stands there now.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

import typer

from reef_cli.commands import output
from reef_cli.commands.chain import Row, chains_of, find, release_row, service_of
from reef_cli.commands.shell import DryRun, Scenario, Shell, Yes, confirm, items, new_app, scenario_path, with_shell
from reef_cli.core.errors import HeadMoved, ScenarioNotFound, UsageError
from reef_cli.core.ids import valid_scenario
from reef_cli.core.types import Surface

app = new_app("Show and set who answers which share of the traffic: pin, canary, shadow")

NO_POLICY, HEAD = "none", "head"

ExpectedHead = Annotated[
    str | None,
    typer.Option(
        "--expected-head", help="Set only if this routing release is in force, `none` for none  [default: the one seen]"
    ),
]


class Policies(Protocol):
    """What the commands ask of a scenario's routing."""

    def view(self, scenario: str) -> dict[str, Any]: ...

    def log(self, scenario: str) -> list[Row]: ...

    def set(self, scenario: str, policy: Mapping[str, Any], expected: str) -> dict[str, Any]: ...


class OnlinePolicies:
    """Policies through the HTTP API."""

    def __init__(self, shell: Shell) -> None:
        self._client = shell.client

    def view(self, scenario: str) -> dict[str, Any]:
        return dict(self._client.get(scenario_path(scenario, "routing")))

    def log(self, scenario: str) -> list[Row]:
        return items(self._client.get(scenario_path(scenario, "routing", "releases")), "releases")

    def set(self, scenario: str, policy: Mapping[str, Any], expected: str) -> dict[str, Any]:
        from reef_cli.control.client import with_query

        path = scenario_path(scenario, "routing")
        # Loading what the policy names may take a while; the server bounds it.
        if policy:
            return dict(self._client.request("PUT", path, {**policy, "expected_head": expected}, timeout_s=600.0).json)
        return dict(self._client.request("DELETE", with_query(path, {"expected_head": expected})).json)


class OfflinePolicies:
    """Policies straight from the home's repository. The next start serves by them, where its engine can."""

    def __init__(self, shell: Shell) -> None:
        self._home = shell.home
        self._service = service_of(shell)

    def view(self, scenario: str) -> dict[str, Any]:
        head = self._service.head(scenario) if valid_scenario(scenario) else None
        if head is None:
            raise ScenarioNotFound(f"no scenario {scenario!r} in {self._home.root}", hint="see: reef release list --all")
        release = self._service.head(scenario, Surface.ROUTING)
        policy = self._service.policy(release)
        shares: dict[str, float] = {}
        for name in policy.arms:
            named = head.release_id if name == HEAD else name
            shares[named] = shares.get(named, 0.0) + policy.shares.get(name, 1.0)
        row = release_row(release, [release.release_id]) if release else None
        return {"scenario": scenario, "policy": policy.wire(), "release": row, "shares": shares, "shadow": policy.shadow}

    def log(self, scenario: str) -> list[Row]:
        chain = self._service.list(scenario, Surface.ROUTING)
        head = [release.release_id for release in chain[:1]]
        return [{**release_row(release, head), "policy": self._service.policy(release).wire()} for release in chain]

    def set(self, scenario: str, policy: Mapping[str, Any], expected: str) -> dict[str, Any]:
        from reef_cli.releases import routing

        parsed = routing.parse(policy)
        release = self._service.route(scenario, parsed, expected)
        return {"scenario": scenario, "policy": parsed.wire(), "release": release_row(release, [release.release_id])}


def policies_of(shell: Shell) -> Policies:
    """The server's view when `--url` is given or a server of this home lives, else the repository's."""
    online = shell.url is not None or shell.running is not None
    return OnlinePolicies(shell) if online else OfflinePolicies(shell)


@app.command()
@with_shell()
def show(shell: Shell, scenario: Scenario = "default") -> None:
    """Show the policy in force, who serves which share, and how a canary does"""
    view = policies_of(shell).view(scenario)
    shell.emit(view, lambda: _draw(view))


@app.command("set")
@with_shell()
def set_policy(
    shell: Shell,
    pin: Annotated[str | None, typer.Option("--pin", metavar="RELEASE", help="This release answers everything")] = None,
    canary: Annotated[str | None, typer.Option("--canary", metavar="RELEASE", help="This release answers a share")] = None,
    share: Annotated[float, typer.Option("--share", min=0.0, max=1.0, help="The canary's share of the sessions")] = 0.1,
    auto: Annotated[
        bool, typer.Option("--auto/--no-auto", help="Promote the canary, or take it back, when live reports have shown it")
    ] = True,
    shadow: Annotated[
        str | None, typer.Option("--shadow", metavar="RELEASE", help="This release answers once more, unseen by clients")
    ] = None,
    shadow_share: Annotated[float, typer.Option("--shadow-share", min=0.0, max=1.0, help="The shadow's share")] = 1.0,
    scenario: Scenario = "default",
    expected_head: ExpectedHead = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Set the policy: a pin, or a canary, or neither; and a shadow beside either"""
    if (pin is None) == (canary is None) and (pin is not None or shadow is None):
        raise UsageError(
            "give --pin, --canary or --shadow", why="a pin leaves nothing for a canary", hint="see: reef route set -h"
        )
    rows = chains_of(shell).releases(scenario)
    policy: dict[str, Any] = {}
    if pin is not None:
        policy["pin"] = str(find(rows, scenario, pin)["release_id"])
    if canary is not None:
        policy |= {"shares": {HEAD: 1 - share, str(find(rows, scenario, canary)["release_id"]): share}, "auto": auto}
    if shadow is not None:
        policy["shadow"] = {"release_id": str(find(rows, scenario, shadow)["release_id"]), "share": shadow_share}
    _set(shell, scenario, policy, expected_head, yes=yes, dry_run=dry_run)


@app.command()
@with_shell()
def clear(
    shell: Shell, scenario: Scenario = "default", expected_head: ExpectedHead = None, yes: Yes = False, dry_run: DryRun = False
) -> None:
    """Let the head serve everything again"""
    _set(shell, scenario, {}, expected_head, yes=yes, dry_run=dry_run)


@app.command()
@with_shell()
def log(shell: Shell, scenario: Scenario = "default") -> None:
    """List the policies a scenario had, newest first; * is in force"""
    rows = policies_of(shell).log(scenario)
    columns = ("", "release", "operation", "author", "age", "policy")
    shell.emit({"scenario": scenario, "releases": rows}, lambda: output.table(columns, map(_row, rows)))


@app.command()
@with_shell()
def shadows(
    shell: Shell,
    scenario: Scenario = "default",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=500, help="At most this many")] = 20,
) -> None:
    """Show what shadows answered lately, beside what clients got"""
    found = shell.client.get(scenario_path(scenario, "routing", "shadows"), limit=limit)
    columns = ("record", "shadow", "same", "agreement", "answer", "shadow's answer")
    names = ("record_id", "release_id", "same", "agreement", "text", "shadow_text")
    shell.emit(found, lambda: output.table(columns, [[row.get(name) for name in names] for row in found["shadows"]]))


def _set(shell: Shell, scenario: str, policy: Mapping[str, Any], expected: str | None, *, yes: bool, dry_run: bool) -> None:
    """Set a policy over the one seen, after a look and a question."""
    policies = policies_of(shell)
    view = policies.view(scenario)
    seen = str((view.get("release") or {}).get("release_id") or NO_POLICY)
    plan = {"scenario": scenario, "policy": dict(policy), "head": seen, "dry_run": dry_run}
    words = "clear the routing" if not policy else f"set the routing to {told(policy)}"
    if dry_run:
        shell.emit({**plan, "applied": False}, lambda: print(f"would {words} of {scenario}, over {seen}"))
        return
    confirm(f"{words.capitalize()} of {scenario}, over {seen}?", yes=yes)
    try:
        done = policies.set(scenario, policy, expected or seen)
    except HeadMoved as error:
        error.hint = error.hint or f"look again: reef route show -s {scenario}"
        raise
    release = done["release"]["release_id"]
    shell.emit({**plan, **done, "applied": True}, lambda: print(f"{scenario} is routed by {release}: {told(done['policy'])}"))
    shell.hint(f"reef route show -s {scenario}")


def told(policy: Mapping[str, Any]) -> str:
    """A policy in one line."""
    parts = [f"pin {policy['pin']}"] if policy.get("pin") else []
    parts += [f"{name} {share:.4g}" for name, share in (policy.get("shares") or {}).items()]
    shadow = policy.get("shadow")
    if shadow:
        parts.append(f"shadow {shadow['release_id']}")
    if policy.get("auto"):
        parts.append("judged on reports")
    return ", ".join(parts) or "the head serves everything"


def _row(row: Row) -> list[object]:
    mark = "*" if row.get("current") else ""
    age = output.age(row.get("recorded_at"))
    return [mark, row["release_id"], row.get("operation"), row.get("author"), age, told(row.get("policy") or {})]


def _draw(view: Mapping[str, Any]) -> None:
    release = view.get("release") or {}
    output.pairs(
        [
            ("policy", told(view["policy"])),
            ("release", release.get("release_id") or NO_POLICY),
            *((f"share.{name}", f"{share:.4g}") for name, share in view["shares"].items()),
            ("shadow", view.get("shadow")),
            ("fault", view.get("fault")),
            *((f"canary.{name}", fact) for name, fact in (view.get("canary") or {}).items()),
        ]
    )

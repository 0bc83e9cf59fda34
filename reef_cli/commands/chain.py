"""Release chains as commands see them: through the server when one runs, else straight from the home's repository.

Both ways answer with the same rows, so a command does not know which it uses. Offline changes are safe beside a server that
starts meanwhile: the chain's head moves only by compare-and-swap.
"""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol

from reef_cli.commands.shell import Shell, items, scenario_name, scenario_path
from reef_cli.core.errors import ConflictError, ReleaseNotFound, ScenarioNotFound, UsageError
from reef_cli.core.ids import ReleaseId, valid_scenario
from reef_cli.core.types import Release

Row = dict[str, Any]


class Chains(Protocol):
    """What release commands ask. Rows are those of `GET /reef/scenarios/{s}/releases`."""

    def scenarios(self) -> list[str]: ...

    def releases(self, scenario: str) -> list[Row]: ...

    def diff(self, scenario: str, a: str, b: str) -> Any: ...

    def promote(self, scenario: str, release_id: str, expected_head: str | None) -> Row: ...

    def rollback(self, scenario: str, release_id: str | None, expected_head: str | None) -> Row: ...

    def dismiss(self, scenario: str, release_id: str) -> Row: ...


def chains_of(shell: Shell) -> Chains:
    """The server's view when `--url` is given or a server of this home lives, else the repository's."""
    if shell.url is not None or shell.running is not None:
        return OnlineChains(shell)
    return OfflineChains(shell)


class OnlineChains:
    """Chains through the HTTP API."""

    def __init__(self, shell: Shell) -> None:
        self._client = shell.client

    def scenarios(self) -> list[str]:
        rows = items(self._client.get("/reef/scenarios"), "scenarios")
        return [scenario_name(row) for row in rows]

    def releases(self, scenario: str) -> list[Row]:
        return items(self._client.get(scenario_path(scenario, "releases")), "releases")

    def diff(self, scenario: str, a: str, b: str) -> Any:
        return self._client.get(scenario_path(scenario, "releases", a, "diff", b))

    def promote(self, scenario: str, release_id: str, expected_head: str | None) -> Row:
        return self._move(scenario, "promote", release_id, expected_head)

    def rollback(self, scenario: str, release_id: str | None, expected_head: str | None) -> Row:
        return self._move(scenario, "rollback", release_id, expected_head)

    def dismiss(self, scenario: str, release_id: str) -> Row:
        return dict(self._client.post(scenario_path(scenario, "dismiss"), {"release_id": release_id}))

    def _move(self, scenario: str, verb: str, release_id: str | None, expected_head: str | None) -> Row:
        body = {name: value for name, value in (("release_id", release_id), ("expected_head", expected_head)) if value}
        # Loading a release into the engine may take a while; the server bounds it.
        answer = self._client.post(scenario_path(scenario, verb), body, timeout_s=600.0)
        return dict(answer.get("release", answer))


class OfflineChains:
    """Chains straight from `<home>/releases.git`, for when no server runs."""

    def __init__(self, shell: Shell) -> None:
        self._home = shell.home
        self._service = service_of(shell)

    def scenarios(self) -> list[str]:
        return list(self._service.scenarios())

    def releases(self, scenario: str) -> list[Row]:
        head = self._head(scenario)
        return [release_row(release, head.release_id) for release in self._service.list(scenario)]

    def diff(self, scenario: str, a: str, b: str) -> Any:
        return plain_data(self._service.diff(self._service.get(scenario, a), self._service.get(scenario, b)))

    def promote(self, scenario: str, release_id: str, expected_head: str | None) -> Row:
        self._head(scenario)
        return self._moved(self._service.promote(scenario, ReleaseId(release_id), _id(expected_head)))

    def rollback(self, scenario: str, release_id: str | None, expected_head: str | None) -> Row:
        self._head(scenario)
        return self._moved(self._service.rollback(scenario, _id(release_id), _id(expected_head)))

    def dismiss(self, scenario: str, release_id: str) -> Row:
        head = self._head(scenario)
        return release_row(self._service.dismiss(scenario, ReleaseId(release_id)), head.release_id)

    def _moved(self, release: Release) -> Row:
        return release_row(release, release.release_id)

    def _head(self, scenario: str) -> Release:
        head: Release | None = self._service.head(scenario) if valid_scenario(scenario) else None
        if head is None:
            raise ScenarioNotFound(f"no scenario {scenario!r} in {self._home.root}", hint="see: reef release list --all")
        return head


def service_of(shell: Shell) -> Any:
    """The release service over the home's repository. Refuses a home that has none, so that looking makes nothing."""
    if not shell.home.releases.exists():
        raise ScenarioNotFound(
            f"there are no releases in {shell.home.root}",
            why="no server has run with this home" if not shell.home.root.exists() else "its release repository is missing",
            hint="another home? give --home; or start one: reef serve",
        )
    from reef_cli.releases.service import ReleaseService

    return ReleaseService(shell.home.root)


def local_only(shell: Shell, what: str) -> None:
    """Refuse what works on the repository itself when another server was named."""
    if shell.url is not None and not (shell.running is not None and shell.running.url == shell.url):
        raise UsageError(
            f"{what} works on the repository itself", why="--url names a server elsewhere", hint="run it on that machine"
        )


def release_row(release: Release, head: str) -> Row:
    """A release as the API shows it."""
    row = asdict(release)
    row["surface"], row["operation"] = release.surface.value, release.operation.value
    row["current"] = release.release_id == head and not release.pending
    return row


def current(rows: list[Row], scenario: str) -> Row:
    """The head among rows."""
    for row in rows:
        if row.get("current"):
            return row
    raise ReleaseNotFound(f"scenario {scenario} has no release yet", hint="see: reef status")


def find(rows: list[Row], scenario: str, release_id: str) -> Row:
    """A release by its id, or by a prefix that only one has."""
    matches = [row for row in rows if str(row["release_id"]) == release_id]
    matches = matches or [row for row in rows if str(row["release_id"]).startswith(release_id)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        named = ", ".join(str(row["release_id"]) for row in matches[:5])
        raise ConflictError(f"{release_id!r} could be several releases", why=named, hint="give the whole id")
    raise ReleaseNotFound(f"no release {release_id} in {scenario}", hint=f"see: reef release list -s {scenario}")


def rollback_target(rows: list[Row], head: Row) -> Row | None:
    """What a rollback without a name goes back to: the nearest earlier release of the head's surface (or the creation
    release) whose content differs."""
    surface = head.get("surface")
    chain = [row for row in rows if not row.get("pending")]
    served = [row for row in chain if row.get("surface") == surface or row.get("operation") == "creation"]
    earlier = served[served.index(head) + 1 :] if head in served else []
    return next((row for row in earlier if row.get("content_id") != head.get("content_id")), None)


def plain_data(value: Any) -> Any:
    """Dataclasses of a room as JSON-safe data."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain_data(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): plain_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_data(item) for item in value]
    return value


def _id(release_id: str | None) -> ReleaseId | None:
    return None if release_id is None else ReleaseId(release_id)

"""Release chains as commands see them: through the server when one runs, else straight from the home's repository.

Both ways answer with the same rows, so a command does not know which it uses. Offline changes are safe beside a server that
starts meanwhile: the chain's head moves only by compare-and-swap.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol

from reef_cli.commands.shell import Shell, items, scenario_name, scenario_path
from reef_cli.core import surfaces
from reef_cli.core.errors import ConflictError, ReleaseNotFound, ScenarioNotFound, UsageError
from reef_cli.core.ids import ReleaseId, valid_scenario
from reef_cli.core.types import Operation, Release, Surface

Row = dict[str, Any]

_FACTS = ("release_id", "scenario", "parent_release_id", "content_id", "kind", "step", "recorded_at", "author", "pending")


class Chains(Protocol):
    """What release commands ask. Rows are those of `GET /reef/scenarios/{s}/releases`."""

    def scenarios(self) -> list[str]: ...

    def releases(self, scenario: str) -> list[Row]: ...

    def diff(self, scenario: str, a: str, b: str) -> Any: ...

    def promote(self, scenario: str, release_id: str, expected_head: str | None) -> Row: ...

    def rollback(self, scenario: str, release_id: str, expected_head: str | None, surface: str) -> Row: ...

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
        return self._move(scenario, "promote", {"release_id": release_id, "expected_head": expected_head})

    def rollback(self, scenario: str, release_id: str, expected_head: str | None, surface: str) -> Row:
        return self._move(scenario, "rollback", {"release_id": release_id, "expected_head": expected_head, "surface": surface})

    def dismiss(self, scenario: str, release_id: str) -> Row:
        return dict(self._client.post(scenario_path(scenario, "dismiss"), {"release_id": release_id}))

    def _move(self, scenario: str, verb: str, asked: Mapping[str, str | None]) -> Row:
        body = {name: value for name, value in asked.items() if value}
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
        heads = self._heads(scenario)
        return [release_row(release, heads) for release in self._service.list(scenario)]

    def diff(self, scenario: str, a: str, b: str) -> Any:
        return plain_data(self._service.diff(self._service.get(scenario, a), self._service.get(scenario, b)))

    def promote(self, scenario: str, release_id: str, expected_head: str | None) -> Row:
        self._heads(scenario)
        return self._moved(self._service.promote(scenario, ReleaseId(release_id), _id(expected_head)))

    def rollback(self, scenario: str, release_id: str, expected_head: str | None, surface: str) -> Row:
        self._heads(scenario)
        move = self._service.rollback
        return self._moved(move(scenario, ReleaseId(release_id), _id(expected_head), surface=Surface(surface)))

    def dismiss(self, scenario: str, release_id: str) -> Row:
        heads = self._heads(scenario)
        return release_row(self._service.dismiss(scenario, ReleaseId(release_id)), heads)

    def _moved(self, release: Release) -> Row:
        return release_row(release, [release.release_id])

    def _heads(self, scenario: str) -> list[str]:
        """Release ids at the heads of a scenario's surfaces."""
        found: Mapping[Surface, Release] = self._service.heads(scenario) if valid_scenario(scenario) else {}
        if not found:
            raise ScenarioNotFound(f"no scenario {scenario!r} in {self._home.root}", hint="see: reef release list --all")
        return [release.release_id for release in found.values()]


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


def release_row(release: Release, heads: Collection[str]) -> Row:
    """A release as the API shows it."""
    row = asdict(release)
    row["surface"], row["operation"] = release.surface.value, release.operation.value
    row["current"] = release.release_id in heads and not release.pending
    return row


def current(rows: list[Row], scenario: str, surface: Surface = Surface.WEIGHTS) -> Row:
    """The head of a surface among rows."""
    head = surfaces.head([_release(row) for row in rows], surface)
    if head is None:
        raise ReleaseNotFound(f"scenario {scenario} has no release yet", hint="see: reef status")
    return next(row for row in rows if row["release_id"] == head.release_id)


def main_head(rows: list[Row], scenario: str) -> Row:
    """The head of the surface a scenario evolves: of the weights, unless only its harness was ever released."""
    return current(rows, scenario, surfaces.moved([_release(row) for row in rows])[0])


def meant(rows: list[Row], surface: Surface | None, target: Row | None, expected: str | None) -> Surface:
    """The surface a rollback moves; `AmbiguousSurface` when nothing says which of two."""
    return surfaces.meant([_release(row) for row in rows], surface, None if target is None else _release(target), expected)


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


def rollback_target(rows: list[Row], surface: Surface) -> Row | None:
    """What a rollback without a name goes back to: the nearest earlier release of the surface whose content differs."""
    target = surfaces.previous_content(surfaces.lane([_release(row) for row in rows], surface))
    return next((row for row in rows if target is not None and row["release_id"] == target.release_id), None)


def _release(row: Row) -> Release:
    """What a row says of a release, without its evidence."""
    facts = {name: row[name] for name in _FACTS}
    return Release(**{**facts, "surface": Surface(row["surface"]), "operation": Operation(row["operation"])})


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

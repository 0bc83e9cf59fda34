"""Which paths need which right. One table of decisions, pure functions, no I/O.

Open to everybody: the two probes. Inference needs `infer`, feedback and instructions `report`, reading a harness any valid
token (the installer and its wrapper carry little ones). All else needs `admin`. A token bound to a scenario reaches only
that scenario's paths and nothing that shows several.
"""

from dataclasses import dataclass
from urllib.parse import unquote

from reef_cli.core.errors import Forbidden
from reef_cli.gateway.auth import Principal, Scope

OPEN = frozenset({"/healthz", "/readyz"})
ALIVE_WHILE_DRAINING = frozenset({"/healthz", "/readyz", "/metrics", "/reef/status"})
_BY_HEADER = ("/reef/report", "/reef/train", "/reef/records", "/reef/harness")
_SCENARIOS = "/reef/scenarios/"


@dataclass(frozen=True, slots=True)
class Need:
    """What a request needs: a scope (None: any valid token), and the scenario its path names, or `several` of them."""

    scope: Scope | None
    scenario: str | None = None
    several: bool = False


_INFERENCE = Need(Scope.INFER)


def need(method: str, path: str) -> Need:
    """The right a method and a path (without scenario prefix) ask for."""
    if path.startswith("/v1/"):
        return _INFERENCE
    if path in ("/reef/report", "/reef/train"):
        return Need(Scope.REPORT)
    if path == "/reef/harness" or path.startswith("/reef/harness/"):
        return Need(None if method in ("GET", "HEAD") else Scope.ADMIN)
    if path.startswith(_SCENARIOS):
        return Need(Scope.ADMIN, scenario=unquote(path[len(_SCENARIOS) :].partition("/")[0]))
    return Need(Scope.ADMIN, several=not path.startswith(_BY_HEADER))


def check(principal: Principal, method: str, path: str) -> None:
    """`Forbidden` when the caller may not do this."""
    wanted = need(method, path)
    if wanted.scope is not None and not principal.may(wanted.scope):
        raise Forbidden(
            f"this token may not do this: it lacks the scope {wanted.scope.value!r}", hint="use a token that has it"
        )
    if principal.scenario is None:
        return
    if wanted.several or (wanted.scenario is not None and wanted.scenario != principal.scenario):
        raise Forbidden("this token belongs to one scenario", hint="use an administrator's token")

"""Every error Reef raises on purpose, as one tree. The leaf classes are the closed list of stable codes.

    ReefError                       exit 1, status 500
    ├── UsageError                  exit 2, 400   bad input: what, why, what to do
    │   ├── ConfigError                           serve.yaml, flags, environment
    │   └── InvalidRequest, InvalidReference, BodyTooLarge, ContextOverflow, ModeRefused, …
    ├── NotFoundError               exit 3, 404   scenario, release, record, job, model, suite
    ├── ConflictError               exit 4, 409   head moved, not pending, not restorable, other content, job out
    ├── GateRefused                 exit 5, 409   the evaluation said no
    ├── UnavailableError            exit 6, 503   not running, engine not ready, weights being pushed, draining
    ├── AuthError                   exit 7, 401   missing or wrong token
    └── UpstreamError, EngineError, TrainerError, StorageError, …

Each class carries `code` (stable, documented, tested), `status` (HTTP) and `exit_code` (CLI). `hint` says what to do.
The wording of final errors avoids words clients take for transient ones; transient errors carry one (http contract).
"""

from typing import Any, ClassVar


class ReefError(Exception):
    """Base of the tree. `message` is one sentence for a person; `hint` the next thing to try; `details` go to `--json`."""

    code: ClassVar[str] = "failure"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, why: str = "", hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.why = why
        self.hint = hint
        self.details = details

    def payload(self, request_id: str | None = None) -> dict[str, Any]:
        """The JSON body of `/reef/*` errors and of `--json` failures."""
        error: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.why:
            error["why"] = self.why
        if self.hint:
            error["hint"] = self.hint
        if self.details:
            error["details"] = self.details
        if request_id is not None:
            error["request_id"] = request_id
        return {"error": error}


class UsageError(ReefError, ValueError):
    """The caller asked for something that cannot be asked."""

    code = "usage"
    status = 400
    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, malformed or impossible."""

    code = "config_invalid"


class InvalidRequest(UsageError):
    """A body or parameter does not have the documented shape."""

    code = "invalid_request"


class AmbiguousSurface(UsageError):
    """A rollback names neither a surface nor a release, and the chain has a head for weights and one for a harness."""

    code = "ambiguous_surface"


class InvalidReference(UsageError):
    """A report cites something that is not an inference record of its scenario."""

    code = "invalid_reference"


class InvalidScenario(UsageError):
    """The scenario name is blank, malformed or missing where it is mandatory."""

    code = "invalid_scenario"


class UnsupportedField(UsageError):
    """A field cannot be translated for the configured engine; it is named, never dropped."""

    code = "unsupported_field"


class ContextOverflow(UsageError):
    """The prompt does not fit the model's context. Worded so that agents recognise it and compact."""

    code = "context_length_exceeded"


class ModeRefused(UsageError):
    """The scenario's training mode does not take this instruction."""

    code = "mode_refused"


class InstructionRefused(UsageError):
    """Instruction text broke a screening rule; the text is never echoed."""

    code = "instruction_refused"


class BodyTooLarge(UsageError):
    """The body exceeds the route's byte limit."""

    code = "request_too_large"
    status = 413


class UnsupportedArtifact(UsageError):
    """An artifact is malformed: pickle, wrong keys, path escape, unreadable tensors."""

    code = "artifact_invalid"


class NotFoundError(ReefError, LookupError):
    """The thing named does not exist."""

    code = "not_found"
    status = 404
    exit_code = 3


class RouteNotFound(NotFoundError):
    """No such path."""

    code = "route_not_found"


class MethodNotAllowed(UsageError):
    """The path exists, the method does not."""

    code = "method_not_allowed"
    status = 405


class ScenarioNotFound(NotFoundError):
    """No such scenario, and it may not be created here."""

    code = "scenario_not_found"


class ReleaseNotFound(NotFoundError):
    """No such release in the scenario's chain."""

    code = "release_not_found"


class RecordNotFound(NotFoundError):
    """No such record."""

    code = "record_not_found"


class JobNotFound(NotFoundError):
    """No such job."""

    code = "job_not_found"


class ModelNotFound(NotFoundError):
    """The model is neither in the cache, nor a folder, nor a known name."""

    code = "model_not_found"


class SuiteNotFound(NotFoundError):
    """No such evaluation suite."""

    code = "suite_not_found"


class RecipeNotFound(NotFoundError):
    """The dotted path of a recipe does not lead to one."""

    code = "recipe_not_found"


class AdapterNotFound(NotFoundError):
    """No harness adapter of that name is installed."""

    code = "adapter_not_found"


class ConflictError(ReefError):
    """The world is not in the state the caller assumed."""

    code = "conflict"
    status = 409
    exit_code = 4


class HeadMoved(ConflictError):
    """A compare-and-swap lost: the chain's head is no longer the expected release."""

    code = "head_moved"


class NotPending(ConflictError):
    """Only a held candidate can be promoted."""

    code = "not_pending"


class NotRestorable(ConflictError):
    """The release's content is no longer in the store."""

    code = "not_restorable"


class ContentConflict(ConflictError):
    """The id is taken by other content."""

    code = "content_conflict"


class JobOut(ConflictError):
    """A job of this scenario is under way."""

    code = "job_out"


class JobCancelled(ConflictError):
    """The job was cancelled by a person."""

    code = "job_cancelled"


class ReleaseNotServable(ConflictError):
    """The pinned release exists but cannot be served by this deployment."""

    code = "release_not_servable"


class AlreadyRunning(ConflictError):
    """Another server owns this home, or the port is taken."""

    code = "already_running"


class ProposalConflict(ConflictError):
    """A harness proposal was made against an older release and collides with what came since."""

    code = "proposal_conflict"


class GateRefused(ConflictError):
    """The evaluation did not select the candidate."""

    code = "gate_refused"
    exit_code = 5


class UnavailableError(ReefError):
    """Not now; try again. Worded with a transient word, always sent with `retry-after`."""

    code = "unavailable"
    status = 503
    exit_code = 6


class NotRunning(UnavailableError):
    """No server answers at the address."""

    code = "not_running"


class EngineUnavailable(UnavailableError):
    """The engine is starting, restarting or gone."""

    code = "engine_unavailable"


class PushTimeout(UnavailableError):
    """A request waited longer than allowed for a weight push."""

    code = "push_timeout"


class Draining(UnavailableError):
    """The server is shutting down and takes no new requests."""

    code = "draining"


class RateLimited(UnavailableError):
    """Too many requests for this token."""

    code = "rate_limited"
    status = 429


class AuthError(ReefError):
    """Missing or wrong credentials."""

    code = "unauthorized"
    status = 401
    exit_code = 7


class Forbidden(AuthError):
    """The token is valid but may not do this."""

    code = "forbidden"
    status = 403


class UpstreamError(ReefError):
    """The upstream provider failed or answered nonsense."""

    code = "upstream_error"
    status = 502


class UpstreamTimeout(UpstreamError, TimeoutError):
    """The upstream provider did not answer in time."""

    code = "upstream_timeout"
    status = 504


class EngineError(ReefError):
    """The local engine refused or broke."""

    code = "engine_error"
    status = 502


class TrainerError(ReefError):
    """The trainer subprocess refused, broke or died."""

    code = "trainer_error"


class EvaluationError(ReefError):
    """An evaluation could not be carried out; that is an outage, never a score."""

    code = "evaluation_error"


class StorageError(ReefError, OSError):
    """The disk is full or the store is damaged; nothing was published."""

    code = "storage_error"
    status = 507


class InstallFailed(ReefError):
    """Installing, updating or removing an agent ended with an error; the message has its last words."""

    code = "install_failed"


class MissingDependency(ReefError, ImportError):
    """An optional extra is needed for this."""

    code = "missing_dependency"
    status = 501


def leaves() -> list[type[ReefError]]:
    """Every class of the tree, base first, in declaration order: the closed list of codes."""
    found: list[type[ReefError]] = [ReefError]
    for cls in found:
        found.extend(child for child in cls.__subclasses__() if child not in found)
    return found

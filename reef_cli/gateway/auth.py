"""Who may ask for what: bearer tokens, their scopes, and their rotation without a restart.

Tokens are kept as SHA-256 digests and found by the digest of what a request presents, so that neither the time an answer takes
nor a memory dump of this object tells a token. The token file holds one grant a line,
`TOKEN [scopes=infer,report] [scenario=NAME] [episode=NAME] [expires=UNIX_SECONDS]`; it is read again when it changes and on
SIGHUP.
Knows nothing of routes: `gateway.app` says which scope a path needs.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from reef_cli.config.schema import ReefSettings
from reef_cli.core.clock import Clock, SystemClock
from reef_cli.core.errors import AuthError, ConfigError

_RECHECK_S = 1.0
_log = logging.getLogger(__name__)


class Scope(StrEnum):
    """What a token may do. `admin` includes the others."""

    INFER = "infer"
    REPORT = "report"
    ADMIN = "admin"


ALL = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. `name` is a short digest of the token, safe to log; `scenario` binds the token to one.

    What is made with a token of an `episode` is marked as that trial and never trains.
    """

    name: str
    scopes: frozenset[Scope] = ALL
    scenario: str | None = None
    episode: str | None = None
    expires_at: float | None = None

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes


@dataclass(frozen=True, slots=True)
class _Grant:
    digest: bytes
    principal: Principal = field(repr=False)


def _grant(
    token: str,
    scopes: frozenset[Scope] = ALL,
    scenario: str | None = None,
    episode: str | None = None,
    expires_at: float | None = None,
) -> _Grant:
    digest = hashlib.sha256(token.encode()).digest()
    return _Grant(digest, Principal(digest.hex()[:8], scopes, scenario, episode, expires_at))


def _by_digest(grants: Iterable[_Grant]) -> dict[bytes, _Grant]:
    return {grant.digest: grant for grant in grants}


class TokenBook:
    """All valid tokens. `find` is what the gateway calls; `issue` and `revoke` make short-lived tokens for episodes."""

    def __init__(self, tokens: Sequence[str] = (), *, file: Path | None = None, clock: Clock | None = None) -> None:
        if any(not token.strip() for token in tokens):
            raise ConfigError(
                "a configured token is empty", why="its environment variable is not set", hint="set it, or leave reef.token out"
            )
        self._clock = clock or SystemClock()
        # Found by digest: nobody can steer the digest of a guess, so how long it takes to find says nothing of a token.
        self._fixed = _by_digest(_grant(token.strip()) for token in tokens)
        self._issued: dict[bytes, _Grant] = {}
        self._file = file
        self._from_file: dict[bytes, _Grant] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._checked = float("-inf")
        if file is not None:
            self.reload()

    def find(self, token: str) -> Principal | None:
        """The principal of a token, or None when it is unknown, empty or expired."""
        if not token:
            return None
        self._refresh()
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        grant = self._issued.get(digest) or self._from_file.get(digest) or self._fixed.get(digest)
        if grant is None:
            return None
        found = grant.principal
        return None if found.expires_at is not None and found.expires_at <= self._clock.now() else found

    def issue(
        self, scopes: Iterable[Scope], *, scenario: str | None = None, episode: str | None = None, ttl_s: float | None = None
    ) -> str:
        """A new token, kept in memory only; expired ones are forgotten on the way."""
        now = self._clock.now()
        for digest, old in list(self._issued.items()):
            if old.principal.expires_at is not None and old.principal.expires_at <= now:
                del self._issued[digest]
        token = secrets.token_urlsafe(32)
        grant = _grant(token, frozenset(scopes), scenario, episode, None if ttl_s is None else now + ttl_s)
        self._issued[grant.digest] = grant
        return token

    def revoke(self, token: str) -> None:
        """Forget an issued token; unknown ones are ignored."""
        self._issued.pop(hashlib.sha256(token.encode()).digest(), None)

    def reload(self) -> None:
        """Read the token file now. While it is missing or malformed the tokens read before stay valid."""
        if self._file is None:
            return
        try:
            stamp = self._look(self._file)
            grants = parse_grants(self._file.read_text())
            if not grants:
                raise ConfigError(f"the token file {self._file} holds no token", hint="delete it and start again, or write one")
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            if self._stamp is None:
                raise
            _log.warning("the token file could not be read again, the old tokens stay valid: %s", error)
            return
        if self._stamp is not None:
            _log.info("the token file was read again: %d tokens", len(grants))
        self._from_file, self._stamp = _by_digest(grants), stamp

    @staticmethod
    def _look(file: Path) -> tuple[int, int, int]:
        status = file.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _refresh(self) -> None:
        """Look at the file at most once a second: one `stat` a request would cost as much as the comparison itself."""
        now = self._clock.monotonic()
        if self._file is None or now - self._checked < _RECHECK_S:
            return
        self._checked = now
        try:
            changed = self._look(self._file) != self._stamp
        except OSError as error:
            _log.warning("the token file cannot be looked at, its tokens stay valid: %s", error)
            return
        if changed:
            self.reload()


def parse_grants(text: str) -> list[_Grant]:
    """Grants of a token file; blank lines and `#` comments are skipped. Raises `ConfigError` naming the line, not the token."""
    grants = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        grants.append(_parse_grant(words, number))
    return grants


def _parse_grant(words: Sequence[str], number: int) -> _Grant:
    facts = dict(word.partition("=")[::2] for word in words[1:])
    try:
        if set(facts) - {"scopes", "scenario", "episode", "expires"}:
            raise ValueError
        scopes = frozenset(Scope(name) for name in facts["scopes"].split(",")) if "scopes" in facts else ALL
        expires = float(facts["expires"]) if "expires" in facts else None
    except ValueError as error:
        raise ConfigError(
            f"line {number} of the token file is malformed",
            hint="write TOKEN [scopes=infer,report,admin] [scenario=NAME] [episode=NAME] [expires=UNIX_SECONDS]",
        ) from error
    return _grant(words[0], scopes, facts.get("scenario"), facts.get("episode"), expires)


def open_tokens(settings: ReefSettings, home: Path, clock: Clock | None = None) -> TokenBook:
    """The deployment's tokens: those configured, else those of `<home>/token`, made with one fresh token on first start."""
    configured = [token for token in (settings.token, *settings.tokens) if token is not None]
    if configured:
        return TokenBook(configured, clock=clock)
    file = home / "token"
    make_token_file(file)
    return TokenBook(file=file, clock=clock)


def make_token_file(file: Path) -> None:
    """Write a fresh token with mode 0600 unless the file is there."""
    if file.exists():
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Whole or not at all: a second process that starts now must never read half a token.
    handle, draft = tempfile.mkstemp(dir=file.parent, prefix=".token-")  # mkstemp makes it 0600
    try:
        with os.fdopen(handle, "w") as out:
            out.write(secrets.token_urlsafe(32) + "\n")
            out.flush()
            os.fsync(out.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, file)
    finally:
        Path(draft).unlink()


def presented_token(headers: Mapping[str, str]) -> str | None:
    """The token a request presents. A present `Authorization` decides alone, also when it is malformed (then `""`)."""
    authorization = headers.get("Authorization")
    if authorization is not None:
        scheme, _, token = authorization.strip().partition(" ")
        return token.strip() if scheme.lower() == "bearer" else ""
    key = headers.get("x-api-key")
    return None if key is None else key.strip()


def authenticate(headers: Mapping[str, str], book: TokenBook) -> Principal:
    """Who presents these headers; `AuthError` when nobody valid does."""
    token = presented_token(headers)
    principal = book.find(token) if token else None
    if principal is None:
        raise AuthError(
            "the token is missing" if token is None else "the token is not accepted",
            hint="send Authorization: Bearer <token> or x-api-key: <token>",
        )
    return principal

"""Tokens: who they admit, how they rotate, and what never counts as one."""

import os
import stat
from pathlib import Path

import pytest

from reef_cli.config.schema import ReefSettings
from reef_cli.core.errors import AuthError, ConfigError, Forbidden
from reef_cli.gateway import access
from reef_cli.gateway.auth import ALL, Principal, Scope, TokenBook, authenticate, open_tokens, parse_grants, presented_token


class FakeClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "BeArEr"])
def test_the_scheme_has_no_case_and_the_token_has(scheme: str) -> None:
    book = TokenBook(["TokenOne"])
    assert authenticate({"Authorization": f"{scheme} TokenOne"}, book).scopes == ALL
    with pytest.raises(AuthError):
        authenticate({"Authorization": f"{scheme} tokenone"}, book)


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic T", "BearerSecret T", "T", "Bearer T T", "Bearer \udcff"])
def test_malformed_authorization_never_authenticates(value: str) -> None:
    with pytest.raises(AuthError):
        authenticate({"Authorization": value}, TokenBook(["T"]))


def test_authorization_wins_over_the_key_also_when_wrong() -> None:
    book = TokenBook(["T"])
    assert authenticate({"x-api-key": "T"}, book)
    assert authenticate({"Authorization": "Bearer T", "x-api-key": "wrong"}, book)
    for wrong in ("Bearer wrong", "", "Basic x"):
        with pytest.raises(AuthError):
            authenticate({"Authorization": wrong, "x-api-key": "T"}, book)
    with pytest.raises(AuthError, match="missing"):
        authenticate({}, book)
    assert presented_token({}) is None


def test_an_empty_token_never_authenticates_and_cannot_be_configured() -> None:
    assert TokenBook(["T"]).find("") is None
    assert TokenBook([]).find("") is None
    for tokens in (["", "T"], ["  "]):
        with pytest.raises(ConfigError):
            TokenBook(tokens)
    with pytest.raises(ConfigError):
        open_tokens(ReefSettings(token=""), Path("/nowhere"))


def test_several_tokens_are_valid_at_once(tmp_path: Path) -> None:
    book = open_tokens(ReefSettings(token="old", tokens=("new",)), tmp_path)
    assert book.find("old") and book.find("new") and book.find("older") is None
    assert not (tmp_path / "token").exists()


def test_the_token_file_is_made_once_and_private(tmp_path: Path) -> None:
    home = tmp_path / "home"
    open_tokens(ReefSettings(), home)
    token = (home / "token").read_text().strip()
    assert len(token) >= 40
    assert stat.S_IMODE((home / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert [path.name for path in home.iterdir()] == ["token"]
    again = open_tokens(ReefSettings(), home)
    assert again.find(token) is not None


def test_rotation_without_a_restart(tmp_path: Path) -> None:
    file, clock = tmp_path / "token", FakeClock()
    file.write_text("first\n")
    book = TokenBook(file=file, clock=clock)
    assert book.find("first")
    file.write_text("# two for a while\nfirst\nsecond scopes=infer,report scenario=s1\n")
    clock.time += 2
    assert book.find("first")
    second = book.find("second")
    assert second is not None
    assert second.scenario == "s1"
    assert second.may(Scope.INFER) and not second.may(Scope.ADMIN)
    file.write_text("second\n")
    os.utime(file, (1, 1))
    book.reload()
    assert book.find("first") is None
    assert book.find("second") == Principal(second.name)


@pytest.mark.parametrize("broken", ["", "# nothing\n", "tok scopes=fly\n", "tok colour=red\n", "tok expires=soon\n", "\xff"])
def test_a_broken_or_missing_file_keeps_the_old_tokens(tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "token", FakeClock()
    file.write_text("good\n")
    book = TokenBook(file=file, clock=clock)
    file.write_bytes(broken.encode("latin-1"))
    clock.time += 2
    assert book.find("good")
    file.unlink()
    clock.time += 2
    assert book.find("good")
    assert "stay valid" in caplog.text
    assert "tok " not in caplog.text


def test_an_empty_file_at_the_start_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError):
        TokenBook(file=tmp_path / "token")


def test_a_malformed_line_is_named_without_its_token() -> None:
    with pytest.raises(ConfigError, match="line 2") as caught:
        parse_grants("one\nvery-secret scopes=fly\n")
    assert "very-secret" not in str(caught.value.payload())


def test_episode_tokens_expire_and_can_be_revoked() -> None:
    clock = FakeClock()
    book = TokenBook(["main"], clock=clock)
    token = book.issue([Scope.INFER], scenario="s1", episode="e1", ttl_s=60)
    other = book.issue([Scope.REPORT], ttl_s=None)
    principal = book.find(token)
    assert principal is not None
    assert (principal.scenario, principal.episode) == ("s1", "e1")
    assert token not in repr(principal) and token not in repr(book.__dict__)
    clock.time += 61
    assert book.find(token) is None
    assert book.find(other)
    book.revoke(other)
    assert book.find(other) is None
    book.issue([Scope.INFER], ttl_s=1)
    assert len(book._issued) == 1, "expired ones are forgotten when a new one is made"


def test_expiry_in_the_file(tmp_path: Path) -> None:
    clock = FakeClock()
    (tmp_path / "token").write_text("main\nshort expires=1500 episode=e7\n")
    book = TokenBook(file=tmp_path / "token", clock=clock)
    found = book.find("short")
    assert found is not None and found.episode == "e7"
    clock.time = 1500
    assert book.find("short") is None


@pytest.mark.parametrize(
    ("method", "path", "scopes", "scenario", "allowed"),
    [
        ("POST", "/v1/chat/completions", {Scope.INFER}, "s1", True),
        ("POST", "/v1/chat/completions", {Scope.REPORT}, None, False),
        ("POST", "/reef/report", {Scope.REPORT}, "s1", True),
        ("POST", "/reef/report", {Scope.INFER}, None, False),
        ("GET", "/reef/harness", {Scope.INFER}, "s1", True),
        ("GET", "/reef/harness/install", {Scope.REPORT}, "s1", True),
        ("POST", "/reef/harness/proposals", {Scope.INFER}, None, False),
        ("GET", "/reef/status", {Scope.INFER, Scope.REPORT}, None, False),
        ("GET", "/reef/status", {Scope.ADMIN}, None, True),
        ("GET", "/reef/status", {Scope.ADMIN}, "s1", False),
        ("GET", "/reef/events", {Scope.ADMIN}, "s1", False),
        ("POST", "/reef/scenarios", {Scope.ADMIN}, "s1", False),
        ("GET", "/reef/scenarios/s1/releases", {Scope.ADMIN}, "s1", True),
        ("GET", "/reef/scenarios/s%31/releases", {Scope.ADMIN}, "s1", True),
        ("GET", "/reef/scenarios/s2/releases", {Scope.ADMIN}, "s1", False),
        ("DELETE", "/reef/scenarios/s2", {Scope.ADMIN}, "s1", False),
        ("POST", "/reef/records", {Scope.ADMIN}, "s1", True),
        ("GET", "/metrics", {Scope.ADMIN}, "s1", False),
        ("POST", "/v1/messages", {Scope.ADMIN}, None, True),
    ],
)
def test_what_a_token_may(method: str, path: str, scopes: set[Scope], scenario: str | None, allowed: bool) -> None:
    principal = Principal("p", frozenset(scopes), scenario)
    if allowed:
        access.check(principal, method, path)
    else:
        with pytest.raises(Forbidden):
            access.check(principal, method, path)

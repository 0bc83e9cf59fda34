"""Chains on a real git server over HTTP, large files by the real `git-lfs`."""

import hashlib
import shutil
from pathlib import Path

import pytest

from reef_cli.core.errors import ConflictError, UnavailableError
from reef_cli.releases import ReleaseService
from tests.releases.conftest import Make
from tests.releases.lfs_server import SECRET, forge
from tests.releases.test_upkeep import grow, oids

pytestmark = pytest.mark.skipif(shutil.which("git-lfs") is None, reason="git-lfs is not installed")


def test_a_chain_travels_by_a_server(service: ReleaseService, adapter: Make, draft: Make, tmp_path: Path) -> None:
    """Every release of the chain, not only the head, can be restored at the other end."""
    releases = grow(service, adapter, draft, 3)
    held = service.hold("s", draft(service.store(adapter(seed=40), "lora")), None)
    with forge(tmp_path / "forge") as server:
        sent = service.push(server.url)
        assert (sent.scenarios, sent.objects) == (("s",), 4) and set(server.objects) == oids(service)
        service.push(server.url)
        other = ReleaseService(tmp_path / "other")
        got = other.fetch(server.url)
        assert got.objects == 4 and other.list("s") == service.list("s") and other.verify("s") == []
        assert oids(other) == oids(service) and other.get("s", held.release_id).pending
        for release in releases:
            theirs, ours = other.directory(release.content_id), service.directory(release.content_id)
            name = "adapter_model.safetensors"
            assert (theirs / name).read_bytes() == (ours / name).read_bytes()
        mine = other.rollback("s")
        other.push(server.url, ["s"])
        with pytest.raises(ConflictError, match="moved on"):
            service.rollback("s", releases[0].release_id)
            service.push(server.url)
        third = ReleaseService(tmp_path / "third")
        third.fetch(server.url)
        assert third.head("s") == mine


def test_a_server_that_loses_a_large_file_or_refuses(
    service: ReleaseService, adapter: Make, draft: Make, tmp_path: Path
) -> None:
    grow(service, adapter, draft, 2)
    with forge(tmp_path / "forge") as server:
        wrong = server.url.replace(SECRET, "other-word")
        with pytest.raises(UnavailableError) as refused:
            service.push(wrong)
        assert "other-word" not in str(refused.value) + str(refused.value.why), "an error shows no password"
        assert server.objects == {}
        service.push(server.url)
        oldest = service.list("s")[-1].content_id
        weights = service.directory(oldest) / "adapter_model.safetensors"
        gone = hashlib.sha256(weights.read_bytes()).hexdigest()
        dropped = server.objects.pop(gone)
        other = ReleaseService(tmp_path / "other")
        assert other.fetch(server.url).objects == 1
        assert [release.restorable for release in other.list("s")] == [True, False], "as between folders"
        server.objects[gone] = dropped[:-1]
        with pytest.raises(UnavailableError):
            ReleaseService(tmp_path / "third").fetch(server.url)

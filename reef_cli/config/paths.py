"""Where state lives: everything of one deployment under its home, models in a cache that homes share.

The home is `--home`, else `REEF_HOME`, else `./.reef`. The cache is `REEF_CACHE`, else `$XDG_CACHE_HOME/reef`, else
`~/.cache/reef`: a model is large and the same for every home. Folders are made with mode 0700. Nothing is kept in /tmp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reef_cli.core.errors import StorageError

DEFAULT_HOME = ".reef"


@dataclass(frozen=True, slots=True)
class Home:
    """The layout below one home; properties only name paths, `prepare` makes the folders."""

    root: Path

    @property
    def token(self) -> Path:
        """The bearer token made on first start, mode 0600."""
        return self.root / "token"

    @property
    def page_secret(self) -> Path:
        """32 random bytes that key the links to harness pages, mode 0600."""
        return self.root / "page-secret"

    @property
    def running(self) -> Path:
        """The discovery file of the running server."""
        return self.root / "run" / "serve.json"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def experience(self) -> Path:
        """The experience log (SQLite)."""
        return self.root / "experience.db"

    @property
    def releases(self) -> Path:
        """The bare git repository of all release chains."""
        return self.root / "releases.git"

    @property
    def checkpoints(self) -> Path:
        """The trainer's resumable state."""
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The numbers of each learning step (`steps.jsonl`), and the files of local trackers."""
        return self.root / "metrics"

    @property
    def discovery(self) -> Path:
        """Archives and results of discovery runs, a folder each."""
        return self.root / "discovery"

    @property
    def jobs(self) -> Path:
        """Scratch folders of jobs under way."""
        return self.root / "jobs"

    @property
    def episodes(self) -> Path:
        """Roots of harness episodes under way, and what was kept of ended ones."""
        return self.root / "episodes"

    @property
    def evaluations(self) -> Path:
        """Answers of evaluations that people asked for: what a run that was cut goes on from."""
        return self.root / "evaluations"

    def prepare(self) -> "Home":
        """Make the folders with mode 0700; `StorageError` names the one that cannot be made."""
        for folder in (self.root, self.run, self.logs, self.checkpoints, self.jobs):
            make_private(folder)
        return self

    def listing(self) -> dict[str, str]:
        """Name and path of every place, for `reef paths`."""
        names = ("token", "running", "logs", "experience", "releases", "checkpoints", "metrics", "jobs")
        return {"home": str(self.root), **{name: str(getattr(self, name)) for name in names}}


def home_at(flag: str | None, environ: Mapping[str, str]) -> Home:
    """The home a command works with."""
    return Home(Path(flag or environ.get("REEF_HOME") or DEFAULT_HOME).expanduser().absolute())


def cache_at(environ: Mapping[str, str]) -> Path:
    """The model cache; not made here."""
    if own := environ.get("REEF_CACHE"):
        return Path(own).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "reef"


def make_private(folder: Path) -> None:
    """Make `folder` (and parents) with mode 0700; an existing folder of ours that others may enter is closed to them."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise StorageError(f"cannot make {folder}", why=str(error), hint="choose another: --home PATH or REEF_HOME") from error

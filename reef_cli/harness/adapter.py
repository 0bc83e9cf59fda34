"""Adapters: how a tree becomes the files and launch of one real agent. Mostly data: `adapter.yaml` beside a few Python lines.

The descriptor says where each kind of entry goes, how the agent is installed, started and bound to Reef, what it writes by
itself, and where its log lies. An optional `adapter.py` in the same folder may define the functions of `Hooks`. Endpoint and
token never reach a tree or a rendered file: the agent gets them at start, from a proxy on loopback that knows the real ones.
"""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from reef_cli.core.errors import ConfigError
from reef_cli.harness import paths
from reef_cli.harness.trajectory import Trajectory
from reef_cli.harness.tree import KINDS

DESCRIPTOR = "adapter.yaml"
DIALECTS = ("chat", "messages", "responses")
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class InstallPlan:
    """How the agent gets into its private prefix. `manager` is npm, pypi, or bundled (it travels with the payload).

    `program` is the path below the prefix; `native` names a platform binary used when the launcher is a stub; `node` is the
    least Node version that runs it (None: Node is needed only to install, or not at all).
    """

    manager: str
    package: str = ""
    version: str = ""
    program: str = ""
    native: str = ""
    node: str | None = None
    node_package: str = "22"
    python: str = "3.10"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The checked content of `adapter.yaml`."""

    name: str
    title: str
    dialect: str
    versions: tuple[str, ...]
    install: Mapping[str, Any]
    config: Mapping[str, Any]
    kinds: Mapping[str, Any]
    launch: Mapping[str, Any]
    trajectory: Mapping[str, Any]
    drift: Mapping[str, Any]
    reserved: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    seeds: Mapping[str, str] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    notice: str = "stderr"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One agent. `folder` holds the descriptor and its files; `hooks` is the module of `adapter.py`, or None."""

    descriptor: Descriptor
    folder: Path
    hooks: ModuleType | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process an adapter travels as its folder: modules do not."""
        return load, (self.folder,)

    @property
    def name(self) -> str:
        return self.descriptor.name

    def version(self, wanted: str | None = None) -> str:
        """The pinned version: the first, or a listed one."""
        if wanted is None:
            return self.descriptor.versions[0]
        if wanted not in self.descriptor.versions:
            raise ConfigError(
                f"{self.name} {wanted} is not a pinned version", hint=f"one of {', '.join(self.descriptor.versions)}"
            )
        return wanted

    def plan(self, version: str | None = None) -> InstallPlan:
        """The install plan of a version."""
        chosen = self.version(version)
        return InstallPlan(**{**self.descriptor.install, "version": chosen})

    def hook(self, name: str) -> Callable[..., Any] | None:
        found = getattr(self.hooks, name, None)
        return found if callable(found) else None

    def read_trajectory(self, directory: Path, output: str = "") -> Trajectory:
        """What the agent did: from the files it left below its config directory, and what it printed."""
        reader = self.hook("read_trajectory")
        files = sorted(
            (
                path
                for pattern in self.descriptor.trajectory.get("paths", ())
                for path in directory.glob(pattern)
                if path.is_file()
            ),
            key=lambda path: (path.stat().st_mtime_ns, path.name),
        )
        if reader is None:
            return Trajectory()
        found: Trajectory = reader(files, output)
        return found

    def seeds(self) -> dict[str, bytes]:
        """Files the agent owns but must find at its first start."""
        return {path: (self.folder / source).read_bytes() for path, source in self.descriptor.seeds.items()}

    def summary(self) -> dict[str, Any]:
        """What `GET /reef/harness/adapters` lists."""
        plan = self.plan()
        return {
            "name": self.name,
            "title": self.descriptor.title,
            "dialect": self.descriptor.dialect,
            "versions": list(self.descriptor.versions),
            "kinds": sorted(kind for kind in KINDS if self.descriptor.kinds.get(kind)),
            "install": {"manager": plan.manager, "package": plan.package, "version": plan.version, "node": plan.node},
        }


def load(folder: Path) -> Adapter:
    """The adapter of a folder. `ConfigError` names the file and what is wrong with it."""
    path = folder / DESCRIPTOR
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"cannot read {path}", why=str(error).splitlines()[0], hint="an adapter is a folder with adapter.yaml"
        ) from error
    try:
        descriptor = _checked(raw)
        for name in (*descriptor.files.values(), *descriptor.seeds.values()):
            if not (folder / paths.check(name, "an adapter")).is_file():
                raise ValueError(f"the file {name} is missing")
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is no adapter descriptor", why=str(error)) from error
    return Adapter(descriptor, folder, _module(folder, descriptor.name))


def _checked(raw: Any) -> Descriptor:
    if not isinstance(raw, dict):
        raise ValueError("it is not an object")
    known = {item.name for item in fields(Descriptor)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise ValueError(f"unknown keys: {', '.join(unknown)}")
    missing = [
        item
        for item in ("name", "title", "dialect", "versions", "install", "config", "kinds", "launch", "trajectory", "drift")
        if item not in raw
    ]
    if missing:
        raise ValueError(f"missing keys: {', '.join(missing)}")
    descriptor = Descriptor(**{**raw, "versions": tuple(str(version) for version in raw["versions"])})
    if not _NAME.fullmatch(descriptor.name):
        raise ValueError("name is lower-case words joined by hyphens")
    if descriptor.dialect not in DIALECTS:
        raise ValueError(f"dialect is one of {', '.join(DIALECTS)}")
    if not descriptor.versions or any("*" in version or not version[0].isdigit() for version in descriptor.versions):
        raise ValueError("versions lists exact versions, the default first")
    if set(descriptor.kinds) - set(KINDS):
        raise ValueError(f"unknown kinds: {', '.join(sorted(set(descriptor.kinds) - set(KINDS)))}")
    for mode in ("interactive", "headless"):
        argv = descriptor.launch.get(mode)
        if not isinstance(argv, list) or not argv or argv[0] != "{program}":
            raise ValueError(f"launch.{mode} is a list that starts with {{program}}")
    if "{prompt}" not in descriptor.launch["headless"]:
        raise ValueError("launch.headless needs the argument {prompt}")
    if any("{token}" in str(item) for mode in ("interactive", "headless") for item in descriptor.launch[mode]):
        raise ValueError("a token in the arguments would show in the process list")
    plan = InstallPlan(**{**descriptor.install, "version": descriptor.versions[0]})
    if plan.manager not in ("npm", "pypi", "bundled"):
        raise ValueError("install.manager is npm, pypi or bundled")
    for path in (plan.program, descriptor.config["dir"], *descriptor.files, *descriptor.seeds):
        paths.check(path, "an adapter")
    return descriptor


def _module(folder: Path, name: str) -> ModuleType | None:
    path = folder / "adapter.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(f"reef_adapter_{name.replace('-', '_')}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # an adapter's code is foreign; whatever it raises, the adapter is unusable and is named
        raise ConfigError(f"{path} does not load", why=f"{type(error).__name__}: {error}") from error
    return module


def version_key(version: str) -> tuple[int, ...]:
    """Numbers of a dotted version, for comparisons: `0.84.2` -> (0, 84, 2)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])


def sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]

"""Values that settings only point at: a provider's key in a file, a function by its dotted path, a path beside the file."""

from importlib import import_module
from pathlib import Path
from typing import Any

from reef_cli.core.errors import ConfigError


def upstream_key(engine: Any) -> str | None:
    """The provider's key from settings or its 0600 file. Raises `ConfigError` when the file is open to others."""
    if engine.api_key:
        return str(engine.api_key)
    if not engine.api_key_file:
        return None
    path = Path(engine.api_key_file).expanduser()
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path} may be read by others", why="it holds a provider's key", hint=f"chmod 600 {path}")
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read {path}", why=str(error), hint="engine.api_key_file names the provider's key") from error


def dotted(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path} does not lead to a function", why=str(error), hint="give module:function") from error


def beside(source: str, file: Path | None) -> str:
    """A path of the settings: as it stands, or beside the configuration file when it is only there."""
    path = Path(source)
    if file is not None and not path.is_absolute() and not path.exists() and (file.parent / path).exists():
        return str(file.parent / path)
    return source

"""Who listens on a port: `name (pid N)`, read from /proc on Linux.

Best effort, and never a command line, which may hold keys.
"""

from pathlib import Path

_LISTEN = "0A"


def port_owner(port: int) -> str | None:
    """The process that listens on a TCP port, or None when it cannot be told."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    targets = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = any(str(link.readlink()) in targets for link in (process / "fd").iterdir())
            if held:
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:
            # The process ended meanwhile, or belongs to somebody else.
            continue
    return None


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found

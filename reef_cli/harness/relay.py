"""Runs inside an episode's sandbox: the one way out. Standalone script, standard library only, started by path.

    relay.py SOCKET PORT -- ARGV...

Listens on 127.0.0.1:PORT and joins each connection to the unix socket, starts ARGV, passes on its exit status. Dies with its
parent, and takes everything it started along.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_FILE = 1 << 30


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes one way until the source ends, then say so to the target."""
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def join(near: socket.socket, path: str) -> None:
    with near, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as far:
        try:
            far.connect(path)
        except OSError:
            return
        back = threading.Thread(target=pump, args=(far, near), daemon=True)
        back.start()
        pump(near, far)
        back.join()


def serve(listener: socket.socket, path: str) -> None:
    while True:
        near, _ = listener.accept()
        threading.Thread(target=join, args=(near, path), daemon=True).start()


def main(argv: Sequence[str]) -> int:
    path, port, command = argv[0], int(argv[1]), list(argv[3:])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    for kind, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, MAX_FILE)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, limit))
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    # The agent's arguments and variables name the port; when any free one would do, it is filled in here.
    chosen = str(listener.getsockname()[1])
    command = [item.replace("{relay_port}", chosen) for item in command]
    environment = {key: value.replace("{relay_port}", chosen) for key, value in os.environ.items()}
    threading.Thread(target=serve, args=(listener, path), daemon=True).start()
    try:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.stderr.write(f"reef-relay: {error}\n")
        return 127
    status = child.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A `reef serve` process of the demo's own: free port, throw-away home, stopped with the demo."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from reef_cli.control.client import Client
from reef_cli.control.discovery import first_token, read_running
from reef_cli.core.errors import NotRunning, ReefError


class Server:
    """Owns one server process. `log` keeps what it printed."""

    def __init__(self, home: Path, config: Path, overrides: Mapping[str, str]) -> None:
        self.home = home
        self.log = home / "serve.out"
        flags = [word for key, value in overrides.items() for word in (f"--{key}", value)]
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "reef_cli",
                    "serve",
                    "-c",
                    str(config),
                    "--reef.home",
                    str(home),
                    "--reef.port",
                    "0",
                    *flags,
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def wait_ready(self, timeout_s: float, on_wait: Callable[[str], None]) -> Client:
        """A client of the ready server. Raises `NotRunning` with the server's last words when it dies or stays silent."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise NotRunning(
                    "The demo's server stopped while starting.", why=self.last_words(), hint=f"Its log: {self.log}"
                )
            client = self._client()
            if client is not None:
                try:
                    client.get("/readyz")
                    return client
                except ReefError as error:
                    on_wait(error.message)
            time.sleep(0.3)
        raise NotRunning(
            f"The demo's server was not ready within {timeout_s:.0f} s.", why=self.last_words(), hint=f"Its log: {self.log}"
        )

    def _client(self) -> Client | None:
        running = read_running(self.home / "run" / "serve.json")
        if running is None or running.pid != self._process.pid:
            return None
        token = first_token(Path(running.token_file).read_text(encoding="utf-8")) if running.token_file else None
        return Client(running.url, token, timeout_s=600.0)

    def clone(self) -> Client:
        """A further client, for another thread."""
        client = self._client()
        if client is None:
            raise NotRunning("The demo's server is gone.", why=self.last_words())
        return client

    def last_words(self) -> str:
        """The end of what the server printed, on one line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-4:])

    def stop(self) -> None:
        """Ask, wait, then force; the server takes its engine and trainer with it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(10)

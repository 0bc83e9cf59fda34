"""`python -m reef_cli.engines.embedded`: load a model, listen, and leave when told to or when the parent is gone.

OpenMP's waiting threads sleep instead of spinning: on a machine that also trains or serves, spinning made a step 5 to 20 times
slower. The variable must be set before torch is imported.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import asyncio
import ctypes
import logging
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch
from aiohttp import web

from reef_cli.core.errors import ReefError
from reef_cli.core.machine import usable_cores
from reef_cli.engines.chat_format import ModelChat
from reef_cli.engines.embedded.core import Core
from reef_cli.engines.embedded.engine import Engine
from reef_cli.engines.embedded.model import Model
from reef_cli.engines.embedded.options import Options, parse
from reef_cli.engines.embedded.server import Server
from reef_cli.engines.embedded.updates import Updates

log = logging.getLogger("reef.engine")
_PR_SET_PDEATHSIG = 1


def main() -> int:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    if options.parent_pid is not None:
        _die_with(options.parent_pid)
    try:
        with _bind(options) as listener:
            asyncio.run(_serve(options, listener))
    except (ReefError, OSError, ValueError) as error:
        log.error("cannot start: %s", error)
        return 1
    return 0


def _bind(options: Options) -> socket.socket:
    """Take the port before the slow part, so that a taken port is reported at once."""
    listener = socket.create_server((options.host, options.port), backlog=512)
    listener.setblocking(False)
    return listener


async def _serve(options: Options, listener: socket.socket) -> None:
    core = Core(
        lambda: _load(options), options.weight_version, options.max_running_requests, chunk=options.chunked_prefill_size
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loading = asyncio.ensure_future(asyncio.to_thread(core.start))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        os._exit(0)  # the torch thread cannot be interrupted while it loads
    model = loading.result()
    facts = await _measure(core, model, options)
    engine = Engine(core, model, ModelChat(Path(options.model_path), model.context_length))
    runner = web.AppRunner(
        Server(engine, Updates(engine, options.group_timeout), options, facts).app(), handler_cancellation=True
    )
    await runner.setup()
    await web.SockSite(runner, listener, shutdown_timeout=5).start()
    log.info("listening on %s:%d", *listener.getsockname()[:2])
    await stop.wait()
    await runner.cleanup()
    core.close()


def _load(options: Options) -> Model:
    """In the torch thread, where the thread count counts."""
    torch.set_num_threads(options.threads or usable_cores())
    return Model(
        options.model_path,
        getattr(torch, options.dtype),
        options.max_running_requests + options.prefix_slots,
        options.context_length,
        options.max_lora_rank,
    )


async def _measure(core: Core, model: Model, options: Options) -> dict[str, object]:
    """What this machine keeps of the promises, for `/server_info`."""
    invariant = None
    if not options.skip_invariance_check:
        invariant = await asyncio.wrap_future(core.call(model.invariant))
        if not invariant:
            log.warning("this machine's %s kernels are not batch-invariant: bits may depend on the batch", options.dtype)
    return {"batch_invariant": invariant, "threads": options.threads or usable_cores()}


def _die_with(parent: int) -> None:
    """Leave when `parent` is no longer the parent: by the kernel's signal at once, by looking every second in any case.

    The kernel sends the signal also when only the thread that started this process ended, hence the second look.
    """

    def look(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    def watch() -> None:
        while True:
            look()
            time.sleep(1)

    signal.signal(signal.SIGUSR1, look)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    raise SystemExit(main())

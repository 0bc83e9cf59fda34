"""The language between a server and its trainer processes: typed messages as length-prefixed JSON over an inherited socket.

Standard library only, so the server's side imports no torch. A frame is 4 bytes of length (big endian) and a JSON object with
the key `type`. Commands go to every rank; only rank 0 answers with `Done`, any rank may answer `Failed`. End of file means that
the other side died: a trainer then exits at once, whatever it is doing.
"""

import json
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from reef_cli.core.errors import TrainerError
from reef_cli.core.ids import RecordId
from reef_cli.core.types import Sample, TokenSpan, TokenTrace

HEADER = struct.Struct(">I")
FRAME_LIMIT = 512 * 1024 * 1024
HEARTBEAT_S = 1.0
"""Pause between a trainer's signs of life; the promise is at most 2 s."""


@dataclass(frozen=True, slots=True)
class Init:
    """First command: which model, which program, which settings (`TrainerSettings` as a mapping)."""

    model_dir: str
    program: str
    program_settings: Mapping[str, Any]
    trainer: Mapping[str, Any]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Train:
    """One step from `checkpoint`, else afresh from `base_directory`, else from the base model; results go under `out`."""

    scenario: str
    base_step: int
    base_directory: str | None
    checkpoint: str | None
    samples: tuple[Mapping[str, Any], ...]
    out: str
    reference: str | None = None
    """Weights to measure the step's drift from: an artifact's folder, empty for the base model, None for no measurement."""


@dataclass(frozen=True, slots=True)
class Push:
    """Send the weights in `directory` to the engine at `engine_url`, and `others`, and label them `version`."""

    scenario: str
    directory: str
    version: str
    engine_url: str
    engine_key: str | None = None
    engine_read_key: str | None = None
    transport: str = "group"
    others: Sequence[str] = field(default_factory=list)
    held: str | None = None
    """The label under which the engines should run the weights of `held_directory` (None: the base model) now."""

    held_directory: str | None = None
    delta: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probs of `samples`' action tokens under `directory`'s weights (None: the base model)."""

    directory: str | None
    samples: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave in good order."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a rank that comes over the network: who it is, and that it may."""

    rank: int
    token: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. `facts` are for the log and the status page."""

    pid: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """Sign of life: the phase in words, units done of a total, and seconds since the main thread last moved on."""

    phase: str
    done: int
    total: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """The command's result, JSON-safe."""

    result: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The command failed, the process lives on (`fatal` false) or leaves (`fatal` true)."""

    message: str
    why: str = ""
    hint: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    fatal: bool = False


Message = Init | Train | Push | Score | Stop | Hello | Ready | Progress | Done | Failed
_TYPES: Mapping[str, type] = {
    "init": Init, "train": Train, "push": Push, "score": Score, "stop": Stop,
    "hello": Hello, "ready": Ready, "progress": Progress, "done": Done, "failed": Failed,
}  # fmt: skip
_NAMES = {cls: name for name, cls in _TYPES.items()}


def encode(message: Message) -> bytes:
    """One frame, header included."""
    body = json.dumps({"type": _NAMES[type(message)], **asdict(message)}, allow_nan=True).encode()
    if len(body) > FRAME_LIMIT:
        raise TrainerError(f"A message of {len(body)} bytes is too large for the trainer", hint="lower batch_size")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The message of one frame's body; `TrainerError` when it is none."""
    try:
        fields = json.loads(body)
        message: Message = _TYPES[fields.pop("type")](**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainerError("A message between server and trainer is malformed", why=repr(error)) from error
    return message


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A sample as JSON-safe data."""
    return asdict(sample)


def sample_from_json(data: Mapping[str, Any]) -> Sample:
    """The reverse of `sample_to_json`."""
    raw: dict[str, Any] = dict(data["tokens"])
    raw["spans"] = tuple(TokenSpan(**span) for span in raw["spans"])
    raw |= {key: tuple(raw[key]) for key in ("prompt_ids", "output_ids", "logprobs", "loss_mask")}
    rest = {key: data[key] for key in ("reward", "step", "created_at", "extras")}
    return Sample(
        id=RecordId(data["id"]),
        records=tuple(RecordId(record) for record in data["records"]),
        tokens=TokenTrace(**raw),
        producing=tuple(data["producing"]),
        **rest,
    )


class Channel:
    """The trainer's blocking end of the socket; sending is safe from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Write one frame; raises `OSError` when the other side is gone."""
        frame = encode(message)
        with self._lock:
            self._socket.sendall(frame)

    def receive(self) -> Message | None:
        """The next message; None at end of file."""
        header = self._exactly(HEADER.size)
        if header is None:
            return None
        (length,) = HEADER.unpack(header)
        if length > FRAME_LIMIT:
            raise TrainerError("A message between server and trainer is malformed", why=f"length {length}")
        body = self._exactly(length)
        return None if body is None else decode(body)

    def _exactly(self, count: int) -> bytes | None:
        parts: list[bytes] = []
        while count:
            try:
                part = self._socket.recv(min(count, 1 << 20))
            except ConnectionError:
                return None
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

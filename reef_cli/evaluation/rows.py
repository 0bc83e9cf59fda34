"""Answers of a run as rows, and the JSON lines file they go to as they come: what a run that was cut goes on from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from reef_cli.core.errors import ConfigError
from reef_cli.core.ports import Answer
from reef_cli.evaluation.asking import Asked
from reef_cli.evaluation.grade import Grade
from reef_cli.evaluation.text import printable

# Whole answers: a pairwise judge of a resumed run reads them again.
TEXT_KEPT = 20_000


@dataclass(frozen=True, slots=True)
class Row:
    """One answer of one release."""

    release: str
    item: str
    score: float
    reason: str
    output_tokens: int
    finish: str
    text: str
    tokens: str = ""
    """Digest of the output token ids, empty where the engine gives none: equal digests are equal tokens, which text is not."""
    prompt_tokens: int = 0
    money: float = 0.0

    def asked(self) -> Asked:
        """The row as the outcome it was."""
        answer = Answer(self.text, self.output_tokens, self.finish, None, self.prompt_tokens)
        return Asked(answer, Grade(self.score, self.reason))


def row_of(name: str, item: str, asked: Asked, money: float) -> Row | None:
    """The row of an answer with a grade, else None: it is missing."""
    answer, grade = asked.answer, asked.grade
    if answer is None or grade is None:
        return None
    text = printable(answer.text, TEXT_KEPT)
    return Row(
        name, item, grade.score, printable(grade.reason, 400), answer.output_tokens, answer.finish, text,
        tokens_digest(answer), answer.prompt_tokens, money,
    )  # fmt: skip


def tokens_digest(answer: Answer) -> str:
    if answer.completion is None:
        return ""
    ids = ",".join(map(str, answer.completion.output_ids))
    return f"sha256:{hashlib.sha256(ids.encode()).hexdigest()[:32]}"


class State:
    """The answers so far, on disk when there is a path. One writer: the run."""

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        lines = _whole_lines(path)
        if lines:
            self._resume(path, lines, header)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = path.open("w" if not lines else "a", encoding="utf-8")
        if not lines:
            self._write(header)

    def _resume(self, path: Path, lines: Sequence[str], header: Mapping[str, Any]) -> None:
        try:
            known, *rows = [json.loads(line) for line in lines]
            parsed = [Row(**row) for row in rows]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is no state of an evaluation", why=str(error), hint="name another file") from error
        if known != dict(header):
            changed = sorted(key for key in header if not isinstance(known, dict) or known.get(key) != header[key])
            raise ConfigError(f"{path} belongs to another run", why=f"{', '.join(changed)} differ", hint="name another file")
        self.rows = {(row.release, row.item): row for row in parsed}

    def add(self, row: Row) -> None:
        self.rows[row.release, row.item] = row
        self._write(asdict(row))

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(value, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _whole_lines(path: Path) -> list[str]:
    """The complete lines of a state file; a torn last one (killed while writing) is cut off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return whole.decode("utf-8").splitlines()

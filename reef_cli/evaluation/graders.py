"""Graders: what an answer is worth, in [0, 1], and why. The registry `GRADERS` is their one home.

A grader in a suite is an object with `kind` and the fields of the class registered under it:

    {"kind": "exact", "value": "Paris", "ignore_case": true}
    {"kind": "contains", "value": "Paris"}
    {"kind": "contains", "any": ["paris", "lutetia"], "all": ["france"], "ignore_case": true}
    {"kind": "regex", "pattern": "^\\\\d+$"}
    {"kind": "numeric", "value": 42, "tolerance": 0.5, "which": "last"}
    {"kind": "json_schema", "schema": {"type": "object"}}          needs the `jsonschema` package
    {"kind": "one_sentence"}    {"kind": "max_words", "words": 20}
    {"kind": "all_of", "graders": [...]}    {"kind": "any_of", "graders": [...]}    {"kind": "mean_of", "graders": [...]}
    {"kind": "not", "grader": {...}}
    {"kind": "python", "path": "my.module:function", "arguments": {...}}    function(answer: str, **arguments)
    {"kind": "unit_tests", ...}                                             see `unit_tests`
    {"kind": "judge", ...}    {"kind": "pairwise", ...}                     see `judging`

`all_of` takes the least of its parts, `any_of` the greatest, `mean_of` the mean, `not` the complement. Graders do not know
models or suites.
"""

import importlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Literal

from reef_cli.core.errors import ConfigError, EvaluationError, MissingDependency
from reef_cli.evaluation.grade import Combining, Grade, Grader, Judging, Working, grade_now
from reef_cli.evaluation.judging import Judge, Pairwise
from reef_cli.evaluation.text import sentence_fault
from reef_cli.evaluation.unit_tests import UnitTests

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")
# Patterns come from the suite's author, answers from a model: a bound keeps a slow pattern slow, not endless.
_REGEX_LIMIT = 20_000


AnyGrader = Grader | Judging | Combining | Working | Pairwise


def _grade(passed: bool, yes: str, no: str) -> Grade:
    return Grade(1.0, yes) if passed else Grade(0.0, no)


def _fold(text: str, ignore_case: bool) -> str:
    return text.casefold() if ignore_case else text


@dataclass(frozen=True, slots=True)
class Exact:
    """The whole answer, white space at its ends aside."""

    value: str
    ignore_case: bool = False

    def grade(self, answer: str) -> Grade:
        same = _fold(answer.strip(), self.ignore_case) == _fold(self.value.strip(), self.ignore_case)
        return _grade(same, "equal", "not equal")


@dataclass(frozen=True, slots=True)
class Contains:
    """`value` (when given), at least one of `any` (when given) and each of `all` occur."""

    value: str = ""
    any: tuple[str, ...] = ()
    all: tuple[str, ...] = ()
    ignore_case: bool = False

    def __post_init__(self) -> None:
        if not self.value and not self.any and not self.all:
            raise ValueError("needs `value`, `any` or `all`")

    def grade(self, answer: str) -> Grade:
        text = _fold(answer, self.ignore_case)
        needed = (self.value, *self.all) if self.value else self.all
        missing = [part for part in needed if _fold(part, self.ignore_case) not in text]
        if missing:
            return Grade(0.0, f"lacks {missing[0]!r}")
        found = next((part for part in self.any if _fold(part, self.ignore_case) in text), None)
        if self.any and found is None:
            return Grade(0.0, "has none of the accepted texts")
        return Grade(1.0, f"has {found if found is not None else needed[0]!r}")


@dataclass(frozen=True, slots=True)
class Regex:
    """The pattern is found somewhere in the answer (anchor it to say more)."""

    pattern: str
    ignore_case: bool = False

    def __post_init__(self) -> None:
        re.compile(self.pattern)

    def grade(self, answer: str) -> Grade:
        found = re.search(self.pattern, answer[:_REGEX_LIMIT], re.IGNORECASE if self.ignore_case else 0)
        return _grade(found is not None, "matches", "does not match")


@dataclass(frozen=True, slots=True)
class Numeric:
    """The first or last number of the answer, within `tolerance` (absolute) or `relative` of `value`."""

    value: float
    tolerance: float = 0.0
    relative: float = 0.0
    which: Literal["first", "last"] = "last"

    def grade(self, answer: str) -> Grade:
        numbers = _NUMBER.findall(answer)
        if not numbers:
            return Grade(0.0, "no number in the answer")
        number = float(numbers[0 if self.which == "first" else -1].replace(",", ""))
        close = math.isclose(number, self.value, rel_tol=max(self.relative, 1e-12), abs_tol=self.tolerance)
        return _grade(close, f"{number:g} is right", f"{number:g} is not {self.value:g}")


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The answer, a code fence around it aside, is JSON that the schema accepts."""

    schema: Mapping[str, Any]

    def __post_init__(self) -> None:
        _jsonschema().validators.validator_for(self.schema).check_schema(self.schema)

    def grade(self, answer: str) -> Grade:
        fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n\s*```\s*", answer, re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else answer)
        except ValueError as error:
            return Grade(0.0, f"not JSON: {error}")
        fault = next(iter(_jsonschema().validators.validator_for(self.schema)(self.schema).iter_errors(value)), None)
        return _grade(fault is None, "fits the schema", "" if fault is None else f"{fault.json_path}: {fault.message}"[:200])


def _jsonschema() -> Any:
    try:
        return importlib.import_module("jsonschema")
    except ImportError as error:
        raise MissingDependency(
            "the json_schema grader needs jsonschema", why="the package is not installed", hint="pip install jsonschema"
        ) from error


@dataclass(frozen=True, slots=True)
class OneSentence:
    """Exactly one finished sentence: ends with `.`, `!` or `?`, no other sentence ends before, no line break."""

    def grade(self, answer: str) -> Grade:
        fault = sentence_fault(answer)
        return _grade(fault is None, "one finished sentence", fault or "")


@dataclass(frozen=True, slots=True)
class MaxWords:
    """At most `words` words, and at least one."""

    words: int

    def grade(self, answer: str) -> Grade:
        count = len(answer.split())
        return _grade(0 < count <= self.words, f"{count} words", f"{count} words, {self.words} allowed")


@dataclass(frozen=True, slots=True)
class Combined:
    """A grader made of others."""

    graders: tuple[AnyGrader, ...]

    @property
    def parts(self) -> Sequence[AnyGrader]:
        return self.graders

    def combine(self, grades: Sequence[Grade]) -> Grade:
        raise NotImplementedError

    def grade(self, answer: str) -> Grade:
        return grade_now(self, answer)


class AllOf(Combined):
    def combine(self, grades: Sequence[Grade]) -> Grade:
        return min(grades, key=lambda grade: grade.score)


class AnyOf(Combined):
    def combine(self, grades: Sequence[Grade]) -> Grade:
        return max(grades, key=lambda grade: grade.score)


class MeanOf(Combined):
    """Partial credit: the mean of the parts."""

    def combine(self, grades: Sequence[Grade]) -> Grade:
        return Grade(sum(grade.score for grade in grades) / len(grades), "; ".join(grade.reason for grade in grades))


@dataclass(frozen=True, slots=True)
class Not:
    grader: AnyGrader

    @property
    def parts(self) -> Sequence[AnyGrader]:
        return (self.grader,)

    def combine(self, grades: Sequence[Grade]) -> Grade:
        return Grade(1.0 - grades[0].score, f"not: {grades[0].reason}")

    def grade(self, answer: str) -> Grade:
        return grade_now(self, answer)


@dataclass(frozen=True, slots=True)
class Python:
    """A person's own function: `function(answer, **arguments)` -> bool, number in [0, 1], or (number, reason)."""

    blocking: ClassVar[bool] = True
    path: str
    arguments: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        load_callable(self.path)

    def grade(self, answer: str) -> Grade:
        try:
            result = load_callable(self.path)(answer, **(self.arguments or {}))
            score, reason = result if isinstance(result, tuple) else (result, self.path)
            value = float(score)
        except Exception as error:  # a person's code may raise anything; a broken grader is an outage, not a score
            raise EvaluationError(f"grader {self.path} failed", why=f"{type(error).__name__}: {error}") from error
        if not 0.0 <= value <= 1.0:
            raise EvaluationError(f"grader {self.path} gave {value}", why="scores lie between 0 and 1")
        return Grade(value, str(reason))


GRADERS: dict[str, type[Any]] = {
    "exact": Exact,
    "contains": Contains,
    "regex": Regex,
    "numeric": Numeric,
    "json_schema": JsonSchema,
    "one_sentence": OneSentence,
    "max_words": MaxWords,
    "all_of": AllOf,
    "any_of": AnyOf,
    "mean_of": MeanOf,
    "not": Not,
    "python": Python,
    "unit_tests": UnitTests,
    "judge": Judge,
    "pairwise": Pairwise,
}


def load_callable(path: str) -> Callable[..., Any]:
    """The object a dotted path `module:name` leads to. `ConfigError` when there is none."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path!r} leads nowhere", why=str(error), hint="write it as module:function") from error
    if not callable(found):
        raise ConfigError(f"{path!r} is not callable")
    return found  # type: ignore[no-any-return]


def build(spec: object) -> AnyGrader:
    """The grader a suite's object describes. `ConfigError` for unknown kinds, keys and values; `MissingDependency`."""
    if not isinstance(spec, Mapping) or not isinstance(spec.get("kind"), str):
        raise ConfigError("a grader is an object with a `kind`", hint=f"kinds: {', '.join(GRADERS)}")
    kind = spec["kind"]
    if kind not in GRADERS:
        raise ConfigError(f"unknown grader {kind!r}", hint=suggest(kind, GRADERS))
    given = {key: value for key, value in spec.items() if key != "kind"}
    known = {field.name: field for field in fields(GRADERS[kind])}
    for key in given:
        if key not in known:
            raise ConfigError(f"grader {kind} has no key {key!r}", hint=suggest(key, known))
    for name, field in known.items():
        if field.default is MISSING and name not in given:
            raise ConfigError(f"grader {kind} needs {name!r}")
    try:
        return GRADERS[kind](**{key: _value(kind, key, value) for key, value in given.items()})  # type: ignore[no-any-return]
    except (ConfigError, MissingDependency):
        raise
    except Exception as error:  # checks of foreign values: re.error, jsonschema's own errors, ValueError
        raise ConfigError(f"grader {kind} cannot be made", why=str(error)) from error


def suggest(word: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"one of {', '.join(known)}"


def _value(kind: str, key: str, value: object) -> object:
    if key == "graders":
        if not isinstance(value, list) or not value:
            raise ConfigError(f"grader {kind} needs a list of graders")
        return tuple(_part(kind, part) for part in value)
    if key == "grader":
        return _part(kind, value)
    if key in ("any", "all"):
        if not isinstance(value, list) or not all(isinstance(part, str) and part for part in value):
            raise ConfigError(f"{key!r} of grader {kind} must be a list of texts")
        return tuple(value)
    wanted = str if key == "value" and kind != "numeric" else _TYPES[key]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{key!r} of grader {kind} has the wrong type", why=f"got {type(value).__name__}")
    return _in_range(kind, key, value) if kind in ("numeric", "max_words") else value


def _part(kind: str, spec: object) -> AnyGrader:
    part = build(spec)
    if isinstance(part, Pairwise):
        raise ConfigError(f"grader {kind} cannot hold pairwise", why="it compares two answers and grades none")
    return part


def _in_range(kind: str, key: str, value: object) -> object:
    if key == "which":
        if value not in ("first", "last"):
            raise ConfigError("`which` is first or last")
        return value
    assert isinstance(value, int | float)
    if not math.isfinite(value) or (key != "value" and value < 0) or (key == "words" and value < 1):
        raise ConfigError(f"{key!r} of grader {kind} is out of range", why=f"got {value}")
    return value


_TYPES: dict[str, Any] = {
    "value": int | float,
    "ignore_case": bool,
    "pattern": str,
    "tolerance": int | float,
    "relative": int | float,
    "which": str,
    "schema": Mapping,
    "words": int,
    "path": str,
    "arguments": Mapping,
    "tests": str,
    "timeout_s": int | float,
    "partial": bool,
    "rubric": str,
    "reference": str,
    "votes": int,
    "tokens": int,
}

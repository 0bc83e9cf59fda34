"""Graders: what passes, what does not, and how a wrong description is refused."""

import importlib.util
import sys

import pytest

from reef_cli.core.errors import ConfigError, EvaluationError, MissingDependency
from reef_cli.evaluation.graders import GRADERS, build
from reef_cli.evaluation.text import is_looping, is_refusal, printable, sentence_fault

CASES = [
    ({"kind": "exact", "value": "Paris"}, " Paris\n", "paris"),
    ({"kind": "exact", "value": "Paris", "ignore_case": True}, "PARIS", "Paris!"),
    ({"kind": "contains", "any": ["paris", "rome"], "ignore_case": True}, "It is PARIS.", "It is Oslo."),
    ({"kind": "contains", "value": "Paris"}, "It is Paris.", "It is paris."),
    ({"kind": "contains", "value": "a", "any": ["b", "c"]}, "a c", "c"),
    ({"kind": "contains", "all": ["a", "b"]}, "b and a", "only a"),
    ({"kind": "contains", "any": ["x"], "all": ["a"]}, "a x", "x"),
    ({"kind": "regex", "pattern": r"^\d{4}$"}, "2024", "the year 2024"),
    ({"kind": "numeric", "value": 42}, "6 times 7 is 42.", "42 or 43"),
    ({"kind": "numeric", "value": 42, "which": "first"}, "42, not 43", "41 or 42"),
    ({"kind": "numeric", "value": 1234.5}, "That is $1,234.50", "1234"),
    ({"kind": "numeric", "value": -3, "tolerance": 0.5}, "about -3.4", "about 3"),
    ({"kind": "numeric", "value": 1e6, "relative": 0.01}, "1.005e6", "1.2e6"),
    ({"kind": "max_words", "words": 3}, "one two three", "one two three four"),
    ({"kind": "max_words", "words": 3}, "one", "  "),
    ({"kind": "one_sentence"}, "Water boils at 99.9 degrees.", "It boils. It steams."),
    ({"kind": "not", "grader": {"kind": "contains", "any": ["no"]}}, "yes", "no"),
    (
        {"kind": "all_of", "graders": [{"kind": "one_sentence"}, {"kind": "max_words", "words": 3}]},
        "I agree.",
        "I do not agree.",
    ),
    ({"kind": "any_of", "graders": [{"kind": "exact", "value": "a"}, {"kind": "exact", "value": "b"}]}, "b", "c"),
    (
        {"kind": "mean_of", "graders": [{"kind": "contains", "value": "Rome"}, {"kind": "one_sentence"}]},
        "See Rome.",
        "See it. Go.",
    ),
]


def test_partial_credit_is_the_mean_of_the_parts():
    grader = build({"kind": "mean_of", "graders": [{"kind": "contains", "value": "Rome"}, {"kind": "one_sentence"}]})
    scores = [grader.grade(text).score for text in ("Rome.", "Rome. Yes.", "Paris.", "Paris. Yes.")]
    assert scores == [1.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize(("spec", "good", "bad"), CASES)
def test_a_grader_tells_good_from_bad(spec, good, bad):
    grader = build(spec)
    passed, failed = grader.grade(good), grader.grade(bad)
    assert passed.score == 1.0, passed.reason
    assert failed.score == 0.0, failed.reason
    assert failed.reason


@pytest.mark.parametrize(
    "text",
    [
        "One.", "Is it?", "Yes!", 'He said "stop."', "Dr. Smith met J. Bach.", "It costs 3.50 today.", "Well... maybe not.",
        "See e.g. the manual.", "What?!", "  Padded.  ", "(In brackets.)",
    ],
)  # fmt: skip
def test_one_finished_sentence(text):
    assert sentence_fault(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "", "No end", "Two. Sentences.", "Stop! Go.", "Really? Yes.", "A line\nbreak.", "it is big. it is old.",
        "Ends in etc and", "Half done…", "No. It is not.", "It was 1999. Then it ended.",
    ],
)  # fmt: skip
def test_not_one_finished_sentence(text):
    assert sentence_fault(text) is not None


BAD = [
    ("text", "object with a `kind`"),
    ({"value": "x"}, "object with a `kind`"),
    ({"kind": "contain", "any": ["x"]}, "unknown grader"),
    ({"kind": "exact"}, "needs 'value'"),
    ({"kind": "exact", "value": "x", "igncase": True}, "no key"),
    ({"kind": "exact", "value": "x", "ignore_case": "yes"}, "wrong type"),
    ({"kind": "contains"}, "cannot be made"),
    ({"kind": "contains", "any": "paris"}, "list of texts"),
    ({"kind": "regex", "pattern": "("}, "cannot be made"),
    ({"kind": "numeric", "value": "x"}, "wrong type"),
    ({"kind": "numeric", "value": 1, "which": "middle"}, "first or last"),
    ({"kind": "numeric", "value": 1, "tolerance": -1}, "out of range"),
    ({"kind": "max_words", "words": 0}, "out of range"),
    ({"kind": "max_words", "words": True}, "wrong type"),
    ({"kind": "all_of", "graders": []}, "list of graders"),
    ({"kind": "not", "grader": {"kind": "nope"}}, "unknown grader"),
    ({"kind": "python", "path": "json:nothing"}, "leads nowhere"),
    ({"kind": "python", "path": "nonsense"}, "leads nowhere"),
    ({"kind": "python", "path": "sys:maxsize"}, "not callable"),
]


@pytest.mark.parametrize(("spec", "words"), BAD)
def test_wrong_descriptions_are_refused(spec, words):
    with pytest.raises(ConfigError) as refused:
        build(spec)
    assert words in f"{refused.value.message} {refused.value.why}"


def test_a_misspelt_kind_gets_a_suggestion():
    with pytest.raises(ConfigError) as refused:
        build({"kind": "contians", "any": ["x"]})
    assert "'contains'" in refused.value.hint


def test_every_grader_has_a_case():
    assert {spec["kind"] for spec, _, _ in CASES} | {"python", "json_schema", "unit_tests", "judge", "pairwise"} == set(GRADERS)


def half(answer: str, word: str) -> tuple[float, str]:
    return (0.5 if word in answer else 0.0), "by hand"


def test_a_person_s_own_function(monkeypatch):
    module = type(sys)("reef_test_graders")
    module.half, module.broken, module.wide = half, lambda answer: 1 / 0, lambda answer: 2
    monkeypatch.setitem(sys.modules, "reef_test_graders", module)
    grade = build({"kind": "python", "path": "reef_test_graders:half", "arguments": {"word": "cat"}}).grade("a cat")
    assert (grade.score, grade.reason) == (0.5, "by hand")
    for name in ("broken", "wide"):
        with pytest.raises(EvaluationError, match=name):
            build({"kind": "python", "path": f"reef_test_graders:{name}"}).grade("x")


def test_json_schema_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(MissingDependency, match="jsonschema"):
        build({"kind": "json_schema", "schema": {}})


@pytest.mark.skipif(importlib.util.find_spec("jsonschema") is None, reason="jsonschema is not installed")
def test_json_schema():
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    grader = build({"kind": "json_schema", "schema": schema})
    assert grader.grade('{"a": 1}').score == grader.grade('```json\n{"a": 1}\n```').score == 1.0
    assert grader.grade('{"a": "x"}').score == grader.grade("no json").score == 0.0
    with pytest.raises(ConfigError):
        build({"kind": "json_schema", "schema": {"type": "objct"}})


def test_loops_refusals_and_control_characters():
    assert is_looping("the cat sat " * 20) and is_looping("ha" * 100)
    assert not is_looping("A plain answer of a few words.") and not is_looping(" ".join(map(str, range(100))))
    assert is_refusal("I'm sorry, but I cannot do that.") and not is_refusal("Paris is the capital.")
    assert printable("a\x1b[31mred\x07\u202eb\n", 100) == "a[31mredb\n" and len(printable("x" * 999)) == 400

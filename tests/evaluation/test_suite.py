"""Suites: every refusal names the line; splits, limits, digests."""

import json
import sys

import pytest

from reef_cli.core.errors import ConfigError, SuiteNotFound
from reef_cli.evaluation import Suite

GOOD = {"id": "a", "messages": [{"role": "user", "content": "Hi"}], "grader": {"kind": "one_sentence"}}


def lines(*rows):
    return "\n".join(json.dumps(row) if not isinstance(row, str) else row for row in rows)


def test_items_keep_what_the_file_says(tmp_path):
    row = {**GOOD, "split": "development", "tags": ["x"], "weight": 2, "max_new_tokens": 7, "must_not_regress": True}
    path = tmp_path / "suite.jsonl"
    path.write_text(lines(row, "", {**GOOD, "id": "b"}))
    suite = Suite.load(path)
    first, second = suite.items
    assert (first.split, first.tags, first.weight, first.max_new_tokens, first.anchor) == ("development", ("x",), 2.0, 7, True)
    assert (second.split, second.weight, second.anchor) == ("heldout", 1.0, False)
    assert suite.name == "suite.jsonl"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "an item is an object"),
        ({**GOOD, "id": "b", "mesages": []}, "unknown key 'mesages'"),
        ({**GOOD, "id": "b", "weight": 0}, "`weight`"),
        ('{"id": "b", "weight": NaN}', "not JSON"),
        ({**GOOD, "id": ""}, "`id`"),
        ({**GOOD, "id": "b", "messages": []}, "`messages`"),
        ({**GOOD, "id": "b", "messages": [{"role": "robot"}]}, "role"),
        ({**GOOD, "id": "b", "split": "test"}, "`split`"),
        ({**GOOD, "id": "b", "tags": "x"}, "`tags`"),
        ({**GOOD, "id": "b", "max_new_tokens": 0}, "`max_new_tokens`"),
        ({**GOOD, "id": "b", "must_not_regress": 1}, "`must_not_regress`"),
        ({**GOOD, "id": "b", "grader": {"kind": "exakt", "value": "x"}}, "unknown grader"),
        (GOOD, "used before"),
    ],
)
def test_a_bad_line_is_named(row, words):
    with pytest.raises(ConfigError) as refused:
        Suite.parse(lines(GOOD, "", row), "s.jsonl")
    assert "s.jsonl line 3" in refused.value.message and words in f"{refused.value.message} {refused.value.why}"


def test_suggestions_come_through():
    with pytest.raises(ConfigError) as refused:
        Suite.parse(lines({**GOOD, "mesages": []}), "s")
    assert "messages" in refused.value.hint


def test_the_digest_is_of_the_content():
    one = Suite.parse(lines(GOOD), "a")
    spaced = Suite.parse(json.dumps(GOOD, indent=None, separators=(" , ", " : ")), "b")
    other = Suite.parse(lines({**GOOD, "weight": 3}), "a")
    assert one.digest == spaced.digest != other.digest and one.digest.startswith("sha256:")


def test_splits_and_limits():
    rows = [
        {**GOOD, "id": f"i{n}", "split": "development" if n % 2 else "heldout", "must_not_regress": n == 8} for n in range(10)
    ]
    suite = Suite.parse(lines(*rows), "s")
    assert [item.id for item in suite.select("heldout").items] == ["i0", "i2", "i4", "i6", "i8"]
    assert [item.id for item in suite.select("heldout", 2).items] == ["i0", "i8"], "anchors are never cut first"
    assert len(suite.select("all").items) == 10 and suite.select("heldout").digest == suite.digest
    with pytest.raises(ConfigError, match="development"):
        Suite.parse(lines(GOOD), "s").select("development")


def test_no_suite_and_empty_suites(tmp_path):
    with pytest.raises(SuiteNotFound):
        Suite.load(tmp_path / "nothing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no items"):
        Suite.load(tmp_path / "empty.jsonl")


def test_items_from_a_function(monkeypatch):
    module = type(sys)("reef_test_suites")
    module.items = lambda: [GOOD, {**GOOD, "id": "b"}]
    module.broken = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "reef_test_suites", module)
    assert [item.id for item in Suite.load("reef_test_suites:items").items] == ["a", "b"]
    with pytest.raises(ConfigError, match="failed"):
        Suite.load("reef_test_suites:broken")

"""Strict reading of YAML: duplicates, places of errors, YAML 1.2 numbers, aliases."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.config.yaml_file import parse_yaml, read_yaml
from reef_cli.core.errors import ConfigError, ReefError


def values(text: str) -> dict[tuple[str, ...], object]:
    return {path: entry.value for path, entry in parse_yaml(text, "f.yaml").leaves.items()}


def test_a_duplicate_key_is_refused_with_both_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml("reef:\n  port: 1\n  host: x\n  port: 2\n", "f.yaml")
    assert "'port' is given twice" in caught.value.message
    assert caught.value.why == "on line 2 and on line 4"


def test_duplicate_sections_and_nested_keys_too() -> None:
    with pytest.raises(ConfigError, match="'reef' is given twice"):
        parse_yaml("reef:\n  port: 1\nreef:\n  host: x\n", "f.yaml")
    with pytest.raises(ConfigError, match="'a' is given twice"):
        parse_yaml("engine:\n  sglang: {list: [{a: 1, a: 2}]}\n", "f.yaml")


def test_every_leaf_knows_its_line() -> None:
    leaves = parse_yaml("reef:\n\n  port: 1\nengine: {kind: sglang,\n  sglang: {a: 1}}\n", "f.yaml").leaves
    assert {path: entry.origin for path, entry in leaves.items()} == {
        ("reef", "port"): "f.yaml:3",
        ("engine", "kind"): "f.yaml:4",
        ("engine", "sglang", "a"): "f.yaml:5",
    }


@pytest.mark.parametrize(
    ("text", "place"),
    [("reef:\n  port: [1\nengine:\n", "f.yaml:3:7"), ("reef:\n\tport: 1\n", "f.yaml:2:1"), ("a: b: c\n", "f.yaml:1:5")],
)
def test_malformed_yaml_names_line_and_column(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    assert caught.value.message == f"{place} is not valid YAML"
    assert caught.value.why
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_sets_nothing(text: str) -> None:
    assert values(text) == {} or text == "---\n"


def test_an_empty_section_sets_nothing() -> None:
    document = parse_yaml("reef:\ntrainer:\n", "f.yaml")
    assert document.leaves == {}
    assert set(document.sections) == {"reef", "trainer"}


@pytest.mark.parametrize(
    "text", ["- a\n", "word\n", "reef: 5\n", "reef: [1]\n", "a: 1\n---\nb: 2\n", "reef: {[1]: 2}\n", "!!python/x {}\n"]
)
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_yaml(text, "f.yaml")


def test_numbers_follow_yaml_1_2_and_dates_stay_text() -> None:
    found = values("s: {a: 1e-4, b: 1E5, c: -2.5e+3, d: 12, e: 1.5, f: 2024-01-02, g: 1e, h: 'x'}\n")
    assert list(found.values()) == [1e-4, 1e5, -2500.0, 12, 1.5, "2024-01-02", "1e", "x"]


def test_merge_keys_and_aliases_work_below_the_mappings_own_keys() -> None:
    found = values("trainer: &t {rank: 4, alpha: 8}\nevaluation:\n  <<: *t\n  alpha: 1\n")
    assert found["evaluation", "rank"] == 4
    assert found["evaluation", "alpha"] == 1


def test_cycles_and_bombs_are_refused() -> None:
    with pytest.raises(ConfigError, match="contains itself"):
        parse_yaml("engine: &e\n  sglang: *e\n", "f.yaml")
    bomb = "engine:\n  a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    with pytest.raises(ConfigError, match="expand to more than"):
        parse_yaml(bomb, "f.yaml")


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"reef:\n  host: \xff\xfe\n")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_yaml(path)
    path.write_bytes(b"reef:\n  host: a\x00b\n")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read_yaml(path)


@given(st.text(alphabet="abc:-[]{}&*<>!|#'\" \n\t0e1", max_size=60))
def test_no_text_raises_anything_but_the_errors_of_the_house(text: str) -> None:
    with suppress(ReefError):
        parse_yaml(text, "f.yaml")

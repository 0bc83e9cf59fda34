"""SAO's admission: what trains, and every stable reason why something does not; settings; the shipped example."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import recipes.sao.recipe as sao
from recipes.sao.recipe import SAORecipe, SAOSettings
from reef_cli.core.errors import ConfigError
from reef_cli.core.ids import RecordId
from reef_cli.core.types import Cadence, Inference, Report, Sample, Surface, TokenSpan, TokenTrace
from reef_cli.learning.contract import Refusal
from reef_cli.trainer.program import load_program

EXAMPLE = Path(sao.__file__).parent / "examples" / "sao"
TRACE = TokenTrace(
    (1, 2), (3, 4, 5), (-0.5, -0.1, -2.0), (1, 1, 1), (TokenSpan("base", 0, 2), TokenSpan("s@r4-00000000", 2, 3))
)
STEPS = {"base": 0, "s@r4-00000000": 4}


def record(**changes: Any) -> Inference:
    whole = {
        "id": RecordId("r1"), "scenario": "s", "created_at": 1.0, "dialect": "chat", "model": "m", "request": b"{}",
        "messages": (), "response": None, "tokens": TRACE,
    }  # fmt: skip
    return Inference(**(whole | changes))


def report(**changes: Any) -> Report:
    return replace(Report(RecordId("p1"), "s", 2.0, (RecordId("r1"),), score=0.75), **changes)


def admit(rep: Report, *records: Inference, **settings: Any) -> Sample | Refusal:
    return SAORecipe(SAOSettings(**settings)).admit(rep, records, STEPS)


def test_a_scored_receipt_is_a_sample_with_the_oldest_step() -> None:
    sample = admit(report(), record())
    assert isinstance(sample, Sample)
    assert (sample.reward, sample.step, sample.records, sample.id) == (0.75, 0, ("r1",), "p1")
    assert sample.producing == ("base", "s@r4-00000000") and sample.tokens is TRACE and sample.created_at == 2.0


@pytest.mark.parametrize(
    ("rep", "records", "reason"),
    [
        (report(score=None, feedback="good"), (record(),), "needs_score"),
        (report(score=math.nan), (record(),), "score_not_finite"),
        (report(score=math.inf), (record(),), "score_not_finite"),
        (report(), (record(), record(id="r2")), "needs_single_receipt"),
        (report(), (), "needs_single_receipt"),
        (report(), (record(complete=False),), "incomplete"),
        (report(), (record(tokens=None),), "no_tokens"),
        (report(), (record(tokens=replace(TRACE, loss_mask=(0, 0, 0))),), "nothing_trainable"),
        (report(), (record(tokens=replace(TRACE, temperature=0.0)),), "temperature_out_of_range"),
        (report(), (record(tokens=replace(TRACE, temperature=2.1)),), "temperature_out_of_range"),
        (report(), (record(tokens=replace(TRACE, spans=(TokenSpan("foreign", 0, 3),))),), "unknown_weight_version"),
        (report(), (record(tokens=replace(TRACE, spans=(TokenSpan("base", 0, 2),))),), "span_gap"),
        (report(), (record(tokens=replace(TRACE, logprobs=(-1.0,))),), "length_mismatch"),
        (report(), (record(tokens=replace(TRACE, logprobs=(-1.0, math.nan, -1.0))),), "bad_logprob"),
        (report(), (record(tokens=replace(TRACE, finish="abort")),), "aborted"),
        (report(), (record(tokens=replace(TRACE, output_ids=(), logprobs=(), loss_mask=(), spans=())),), "empty_output"),
    ],
)
def test_refusals_have_stable_reasons(rep: Report, records: tuple[Inference, ...], reason: str) -> None:
    assert admit(rep, *records) == Refusal(reason)


def test_the_contract() -> None:
    assert SAORecipe.name == "sao" and SAORecipe.surface is Surface.WEIGHTS and SAORecipe.cadence is Cadence.ROLLING
    assert SAORecipe.settings_type is SAOSettings and SAOSettings().batch_size == 128


def test_the_program_takes_exactly_the_settings_the_recipe_hands_over() -> None:
    spec = SAORecipe(SAOSettings(eps_low=0.8, eps_high=3.0)).program()
    program = load_program(spec.path, spec.settings)
    assert program.settings.eps_low == 0.8 and program.optimizer.lr == SAOSettings().policy_lr


@pytest.mark.parametrize(
    "wrong",
    [
        {"eps_low": 0.0}, {"eps_low": 1.5}, {"eps_high": 0.0}, {"batch_size": 0}, {"policy_lr": -1.0}, {"gamma": 0.0},
        {"gamma": 1.1}, {"critic_only_steps": -1}, {"critic_steps": 0}, {"alpha_lambda": 0.0}, {"policy_lr": math.nan},
    ],
)  # fmt: skip
def test_impossible_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SAOSettings(**wrong)


def test_every_setting_is_documented_in_the_readme() -> None:
    readme = (Path(sao.__file__).parent / "README.md").read_text()
    missing = [field.name for field in fields(SAOSettings) if f"`{field.name}`" not in readme and field.name != "gate_every"]
    assert not missing


def test_the_example_is_the_articles_three_lines_and_fits_the_settings() -> None:
    config = yaml.safe_load((EXAMPLE / "serve.yaml").read_text())
    assert config["reef"] == {"recipe": "recipes.sao.recipe:SAORecipe", "batch_size": 1, "max_staleness": 18}
    SAOSettings(**{key: value for key, value in config["reef"].items() if key != "recipe"})
    assert config["evaluation"]["suite"] == "recipes/sao/examples/sao/suite.jsonl"


def test_the_suite_loads_its_splits_share_no_country_and_its_graders_ask_for_form_and_content() -> None:
    from reef_cli.evaluation.graders import build
    from reef_cli.evaluation.suite import Suite

    Suite.load(EXAMPLE / "suite.jsonl")
    import json

    rows = [json.loads(line) for line in (EXAMPLE / "suite.jsonl").read_text().splitlines()]
    by_split: dict[str, set[str]] = {"development": set(), "heldout": set()}
    for row in rows:
        by_split[row["split"]].add(row["id"].rsplit("-", 1)[0])
    assert min(map(len, by_split.values())) >= 20 and not by_split["development"] & by_split["heldout"]
    france = build(next(row for row in rows if row["id"] == "capital-france-what")["grader"])
    assert france.grade("The capital of France is Paris.").score == 1
    assert france.grade("The capital of France is Lyon.").score == 0
    assert france.grade("Paris. It is a city.").score == 0
    assert france.grade("The capital of France is Paris").score == 0

"""SFT, OPD and SDFT: what makes a sample, what becomes of it when a job begins, and steps against oracles in plain Python."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.opd.recipe import OPDRecipe, OPDSettings
from recipes.sdft.recipe import SDFTRecipe, SDFTSettings
from recipes.sft.recipe import SFTRecipe, SFTSettings
from reef_cli.core.errors import ConfigError
from reef_cli.core.types import Extras, Sample
from reef_cli.learning.contract import Tools
from reef_cli.trainer.process import join_alone
from tests.recipes.kit import END, STEPS, TOOLS, Letters, admitted, learner, on_policy, record, refused, report
from tests.recipes.test_group_recipes import distributions, jsd
from tests.trainer.conftest import toy_model

__all__ = ["toy_model"]  # the fixture, borrowed

LR = 1e-2


@pytest.fixture(scope="module", autouse=True)
def group() -> None:
    join_alone(threads=1)


def opd(**settings: Any) -> OPDRecipe:
    return OPDRecipe(OPDSettings(policy_lr=LR, **settings))


# -- SFT ---------------------------------------------------------------------------------------------------------------------


def sft(**settings: Any) -> SFTRecipe:
    return SFTRecipe(SFTSettings(policy_lr=LR, **settings))


def test_a_demonstration_replaces_the_answer() -> None:
    told = [{"metadata": {"demonstration": "yes"}}, {"feedback": {"correction": "yes"}}]
    for one in told:
        (sample,) = sft().assemble([admitted(sft(), 1, **one)], TOOLS)
        assert sample.tokens.output_ids == (*Letters().encode("yes"), END) and sample.tokens.fault() is None
        assert sample.tokens.prompt_ids == record().tokens.prompt_ids and sample.tokens.loss_mask == (1,) * 4  # type: ignore[union-attr]


def test_only_demonstrations_and_good_answers_teach() -> None:
    assert refused(sft(), record(), score=1.0) == "needs_demonstration"
    assert refused(sft(imitate_above=0.5), record(), score=0.25) == "needs_demonstration"
    good = admitted(sft(imitate_above=0.5), 1, score=0.5)
    assert sft(imitate_above=0.5).assemble([good], TOOLS) == [good]
    assert refused(sft(), record(), record("r2"), metadata={"demonstration": "x"}) == "needs_single_receipt"


def test_what_cannot_be_rendered_or_is_too_long_has_no_weight() -> None:
    sample = admitted(sft(), 1, metadata={"demonstration": "yes"})
    for recipe, tools in ((sft(max_tokens=8), TOOLS), (sft(), Tools())):
        assert recipe.assemble([sample], tools)[0].extras[Extras.WEIGHT] == 0


def test_an_sft_step_is_the_mean_negative_log_likelihood(toy_model: Path) -> None:
    recipe = sft()
    lab = learner(toy_model, recipe.program())
    made = [admitted(recipe, i, metadata={"demonstration": "yes" * (i + 1)}) for i in range(2)]
    samples = recipe.assemble(made, TOOLS)
    rows = lab.score(None, samples)
    expected = -sum(map(sum, rows)) / sum(map(len, rows))
    first = lab.step(samples).metrics
    assert first["policy_loss"] == pytest.approx(expected, rel=1e-4) and first["imitated_tokens"] == sum(map(len, rows))
    for _ in range(5):
        last = lab.step(samples).metrics
    assert last["policy_loss"] < first["policy_loss"] - 0.2
    nothing = [replace(s, extras={**s.extras, Extras.WEIGHT: 0.0}) for s in samples]
    assert lab.step(nothing).metrics["skipped"] == "nothing_to_imitate"


# -- OPD ---------------------------------------------------------------------------------------------------------------------


def test_opd_needs_a_score_only_where_it_uses_one() -> None:
    assert admitted(opd(), 1, feedback="seen").reward == 0
    assert refused(opd(reward_weight=1.0), record(), feedback="seen") == "needs_score"
    assert refused(opd(continual="logprobs"), record(), feedback="seen") == "needs_score"


def test_the_hint_is_the_teachers_alone() -> None:
    recipe = opd(teacher_hint="be brief")
    (sample,) = recipe.assemble([admitted(recipe, 1, score=1.0)], TOOLS)
    expected = Letters().render([{"role": "user", "content": "ask\n\nbe brief"}])
    assert sample.extras[Extras.TEACHER_PROMPT_IDS] == expected and len(sample.tokens.prompt_ids) < len(expected)


def test_a_sampled_token_step_equals_the_oracle(toy_model: Path) -> None:
    """-A log p with A = reward - (log p - log p_teacher), the teacher being the base after another prompt."""
    recipe = opd(teacher_hint="be brief", reward_weight=0.5)
    lab = learner(toy_model, recipe.program())
    samples = recipe.assemble(on_policy(lab, [admitted(recipe, i, f"ab{i}", score=float(i)) for i in range(2)]), TOOLS)
    total = gap = 0.0
    n = 0
    for sample, theirs in zip(samples, distributions(lab, read(samples)), strict=True):
        for lp, row, token in zip(sample.tokens.logprobs, theirs, sample.tokens.output_ids, strict=True):
            lp_teacher = float(row[token])
            total -= (0.5 * sample.reward - (lp - lp_teacher)) * lp
            gap, n = gap + lp_teacher - lp, n + 1
    metrics = lab.step(samples).metrics
    assert metrics["policy_loss"] == pytest.approx(total / n, rel=1e-3, abs=1e-5)
    assert metrics["teacher_gap"] == pytest.approx(gap / n, rel=1e-3, abs=1e-5)


def read(samples: list[Sample]) -> list[Sample]:
    """What the teacher reads, as samples of its own."""
    return [replace(s, tokens=replace(s.tokens, prompt_ids=tuple(s.extras[Extras.TEACHER_PROMPT_IDS]))) for s in samples]


@pytest.mark.parametrize("loss", ["top_k", "full"])
@pytest.mark.parametrize("support", ["student", "teacher"])
def test_a_listed_or_whole_step_equals_the_oracle(toy_model: Path, loss: Any, support: Any) -> None:
    recipe = opd(teacher_hint="be brief", loss=loss, top_k=6, support=support)
    lab = learner(toy_model, recipe.program())
    samples = recipe.assemble(on_policy(lab, [admitted(recipe, i, f"ab{i}", score=1.0) for i in range(2)]), TOOLS)
    total, n = 0.0, 0
    for mine, theirs in zip(distributions(lab, samples), distributions(lab, read(samples)), strict=True):
        for s, t in zip(mine, theirs, strict=True):
            ids = (s if support == "student" else t).topk(6).indices if loss == "top_k" else torch.arange(len(s))
            a, b = s[ids].tolist(), t[ids].tolist()
            if loss == "top_k":
                a.append(math.log1p(-math.fsum(map(math.exp, a))))
                b.append(math.log1p(-math.fsum(map(math.exp, b))))
            total, n = total + jsd(a, b, 1.0), n + 1
    metrics = lab.step(samples).metrics
    assert metrics["policy_loss"] == pytest.approx(total / n, rel=2e-3, abs=1e-6) and metrics["distilled_tokens"] == n


def test_an_outside_teachers_log_probs_come_with_the_report(toy_model: Path) -> None:
    recipe = opd(teacher="recorded")
    assert refused(recipe, record(), score=1.0) == "needs_teacher_logprobs"
    short = {"teacher_logprobs": [-1.0]}
    assert refused(recipe, record(), score=1.0, metadata=short) == "teacher_length_mismatch"
    lab = learner(toy_model, recipe.program())
    sample = admitted(recipe, 1, score=1.0, metadata={"teacher_logprobs": [-1.0, -2.0, -3.0, -4.0]})
    (sample,) = on_policy(lab, [sample])
    expected = [(lp - t) * lp for lp, t in zip(sample.tokens.logprobs, (-1, -2, -3, -4), strict=True)]
    assert lab.step([sample]).metrics["policy_loss"] == pytest.approx(sum(expected) / 4, rel=1e-4)


def test_an_outside_teachers_top_lists(toy_model: Path) -> None:
    recipe = opd(teacher="recorded", loss="top_k")
    lists = {"teacher_top_ids": [[1, 2]] * 4, "teacher_top_logprobs": [[-0.5, -1.5]] * 4}
    lab = learner(toy_model, recipe.program())
    (sample,) = on_policy(lab, [admitted(recipe, 1, score=1.0, metadata=lists)])
    total = 0.0
    for row in distributions(lab, [sample])[0]:
        mine, theirs = row[[1, 2]].tolist(), [-0.5, -1.5]
        total += jsd(
            [*mine, math.log1p(-math.fsum(map(math.exp, mine)))], [*theirs, math.log1p(-math.exp(-0.5) - math.exp(-1.5))], 1.0
        )
    assert lab.step([sample]).metrics["policy_loss"] == pytest.approx(total / 4, rel=1e-3)


def test_continual_opd_asks_the_teacher_only_about_failures(toy_model: Path) -> None:
    recipe = opd(continual="answers")
    lab = learner(toy_model, recipe.program())
    passed = admitted(recipe, 1, score=1.0, metadata={"teacher_answer": "no"})
    failed = admitted(recipe, 2, score=0.0, metadata={"teacher_answer": "yes", "teacher_cost": 0.25})
    alone = admitted(recipe, 3, score=0.0)
    samples = recipe.assemble([passed, failed, alone], TOOLS)
    assert [s.extras.get(Extras.WEIGHT, 1.0) for s in samples] == [0.0, 1.0, 0.0]
    (row,) = lab.score(None, samples[1:2])
    metrics = lab.step(samples).metrics
    assert metrics["policy_loss"] == pytest.approx(-sum(row) / len(row), rel=1e-4)
    assert metrics["escalated_share"] == pytest.approx(1 / 3) and metrics["imitated_tokens"] == 4
    assert metrics["teacher_cost"] == 0.25


def test_continual_opd_by_the_normalised_gap(toy_model: Path) -> None:
    recipe = opd(continual="logprobs", teacher="recorded", gap_weight=0.5, gap_clip=1.0)
    lab = learner(toy_model, recipe.program())
    metadata = {"teacher_logprobs": [-1.0, -2.0, -3.0, -4.0]}
    failed = admitted(recipe, 1, score=0.0, metadata=metadata)
    (failed,) = on_policy(lab, [failed])
    passed = admitted(recipe, 2, score=1.0, metadata=metadata)
    gap = [t - lp for t, lp in zip((-1, -2, -3, -4), failed.tokens.logprobs, strict=True)]
    rms = math.sqrt(sum(g * g for g in gap) / 4)
    expected = -sum(0.5 * max(-1, min(1, g / rms)) * lp for g, lp in zip(gap, failed.tokens.logprobs, strict=True)) / 4
    metrics = lab.step(recipe.assemble([failed, passed], TOOLS)).metrics
    assert metrics["policy_loss"] == pytest.approx(expected, rel=1e-4) and metrics["escalated_share"] == 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"teacher": "recorded", "loss": "full"}, {"continual": "answers", "loss": "top_k"}, {"top_k": 0},
        {"loss": "full", "off_policy": {"kind": "ppo"}}, {"off_policy": {"kind": "x"}},
    ],
)  # fmt: skip
def test_impossible_opd_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        opd(**wrong)


# -- SDFT --------------------------------------------------------------------------------------------------------------------


def sdft(**settings: Any) -> SDFTRecipe:
    return SDFTRecipe(SDFTSettings(policy_lr=LR, **settings))


def test_sdft_needs_a_context_and_no_score() -> None:
    assert refused(sdft(), record(), score=1.0) == "needs_teacher_context"
    assert admitted(sdft(), 1, feedback="x", metadata={"teacher_context": "yes"}).reward == 0


def test_the_sdft_teacher_reads_the_given_context_and_nothing_in_it_is_a_place() -> None:
    """Braces of a question or a demonstration stay what they are."""
    recipe = sdft(context="{question} Say: {demonstration}")
    one = record("r1", question="a {demonstration}")
    made = recipe.admit(report("p1", one.id, score=0.0, metadata={"teacher_context": "b {x}"}), [one], STEPS)
    assert isinstance(made, Sample)
    (sample,) = recipe.assemble([made], TOOLS)
    expected = Letters().render([{"role": "user", "content": "a {demonstration} Say: b {x}"}])
    assert sample.extras[Extras.TEACHER_PROMPT_IDS] == expected


@pytest.mark.parametrize("skip", [0, 3])
def test_an_sdft_step_is_forward_kl_after_the_first_tokens(toy_model: Path, skip: int) -> None:
    recipe = sdft(skip_tokens=skip)
    lab = learner(toy_model, recipe.program())
    made = [admitted(recipe, i, f"abc{i}", metadata={"teacher_context": "yes"}, score=0.0) for i in range(2)]
    samples = recipe.assemble(on_policy(lab, made), TOOLS)
    total, n = 0.0, 0
    for mine, theirs in zip(distributions(lab, samples), distributions(lab, read(samples)), strict=True):
        for s, t in list(zip(mine, theirs, strict=True))[skip:]:
            total, n = total + jsd(s.tolist(), t.tolist(), 0.0), n + 1
    metrics = lab.step(samples).metrics
    assert metrics["policy_loss"] == pytest.approx(total / n, rel=2e-3, abs=1e-6) and metrics["distilled_tokens"] == n


def test_the_importance_cap_scales_the_divergence(toy_model: Path) -> None:
    """Samples the policy now likes e times better than when they were drawn count twice, not e times."""
    recipe = sdft(skip_tokens=0)
    lab = learner(toy_model, recipe.program())
    (sample,) = recipe.assemble(on_policy(lab, [admitted(recipe, 1, metadata={"teacher_context": "yes"}, score=0.0)]), TOOLS)
    plain = lab.step([sample]).metrics["policy_loss"]
    lab._afresh(None)
    older = replace(sample, tokens=replace(sample.tokens, logprobs=tuple(lp - 1.0 for lp in sample.tokens.logprobs)))
    assert lab.step([older]).metrics["policy_loss"] == pytest.approx(2 * plain, rel=1e-3)


@pytest.mark.parametrize("wrong", [{"alpha": 1.5}, {"teacher_rate": -0.1}, {"top_k": -1}, {"off_policy": {"kind": "ppo"}}])
def test_impossible_sdft_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        sdft(**wrong)

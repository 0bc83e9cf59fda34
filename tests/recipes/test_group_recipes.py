"""GRPO and SDPO: what makes a sample, what a teacher reads, and steps against oracles in plain Python."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

from recipes.grpo.recipe import GRPORecipe, GRPOSettings
from recipes.sdpo.program import hybrid_advantage
from recipes.sdpo.recipe import SDPORecipe, SDPOSettings, context, strip_thinking
from reef_cli.core.errors import ConfigError
from reef_cli.core.types import Extras, Sample
from reef_cli.learning.contract import Group, Tools
from reef_cli.trainer import batching
from reef_cli.trainer.process import join_alone
from tests.recipes.kit import TOOLS, Letters, admitted, learner, on_policy, record, refused
from tests.trainer.conftest import toy_model

__all__ = ["toy_model"]  # the fixture, borrowed


@pytest.fixture(scope="module", autouse=True)
def group() -> None:
    join_alone(threads=1)


def grpo(**settings: Any) -> GRPORecipe:
    return GRPORecipe(GRPOSettings(**{"batch_size": 4, "group_size": 4, "policy_lr": 1e-2, **settings}))


def sdpo(**settings: Any) -> SDPORecipe:
    return SDPORecipe(SDPOSettings(**{"batch_size": 4, "group_size": 4, "policy_lr": 1e-2, "top_k": 8, **settings}))


def answers(recipe: Any, scores: Sequence[float], group: str = "g", **more: Any) -> list[Sample]:
    return [
        admitted(recipe, i, f"ab{i}", score=score, metadata={"group": group, "rollout": i}, **more)
        for i, score in enumerate(scores)
    ]


# -- GRPO --------------------------------------------------------------------------------------------------------------------


def test_a_sample_names_its_group() -> None:
    sample = answers(grpo(), [1.0])[0]
    assert sample.extras == {Extras.GROUP: "g", Extras.ROLLOUT: "0"} and grpo().group(sample) == Group("g", 4, "0")
    assert refused(grpo(), record(), score=1.0) == "needs_group"
    assert refused(grpo(), record(), metadata={"group": 1}) == "needs_score"
    assert admitted(grpo(), 1, score=1.0, metadata={"group": 7}).extras[Extras.GROUP] == "7"


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_a_grpo_step_equals_the_oracle(toy_model: Path, advantage: str, aggregate: str) -> None:
    """At lag 0 the ratio is 1, so the loss is the weighted mean of -A log p."""
    recipe = grpo(advantage=advantage, aggregate=aggregate)
    lab = learner(toy_model, recipe.program())
    rewards = [1.0, 0.0, 1.0, 0.25]
    samples = [replace(s, reward=r) for s, r in zip(answers(recipe, rewards), rewards, strict=True)]
    samples[1] = replace(samples[1], tokens=replace(samples[1].tokens, loss_mask=(1, 0, 1, 1)))
    samples = on_policy_masked(lab, samples)
    mean = fmean(rewards)
    of = {
        "grpo": [(r - mean) / (stdev(rewards) + 1e-6) for r in rewards],
        "dr_grpo": [r - mean for r in rewards],
        "rloo": [r - (sum(rewards) - r) / 3 for r in rewards],
    }[advantage]
    rows = [
        [-a * lp for lp, m in zip(s.tokens.logprobs, s.tokens.loss_mask, strict=True) if m]
        for a, s in zip(of, samples, strict=True)
    ]
    expected = sum(map(sum, rows)) / sum(map(len, rows)) if aggregate == "token" else fmean(fmean(row) for row in rows)
    metrics = lab.step(samples).metrics
    assert metrics["policy_loss"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert metrics["groups"] == 1 and metrics["flat_groups"] == 0 and metrics["published"] is True


def on_policy_masked(lab: Any, samples: list[Sample]) -> list[Sample]:
    found = []
    for item, row in zip(samples, lab.score(None, samples), strict=True):
        values = iter(row)
        logprobs = tuple(next(values) if m else 0.0 for m in item.tokens.loss_mask)
        found.append(replace(item, tokens=replace(item.tokens, logprobs=logprobs)))
    return found


def test_groups_without_a_difference_make_no_step(toy_model: Path) -> None:
    recipe = grpo()
    report = learner(toy_model, recipe.program()).step(answers(recipe, [1, 1, 1, 1]))
    assert report.policy_updated is False and report.metrics["skipped"] == "no_group_differs"
    assert report.metrics["flat_groups"] == 1.0


def test_every_off_policy_kind_makes_a_step(toy_model: Path) -> None:
    for kind in ("dis", "tis", "icepop", "cispo", "ppo", "decoupled", "gspo", "none"):
        recipe = grpo(off_policy={"kind": kind, "min_ess": 0.0, "max_masked": 1.0})
        metrics = learner(toy_model, recipe.program()).step(answers(recipe, [1, 0, 1, 0])).metrics
        assert math.isfinite(metrics["policy_loss"]) and metrics["published"] is True, kind


@pytest.mark.parametrize("wrong", [{"group_size": 1}, {"policy_lr": 0.0}, {"batch_size": 6}, {"off_policy": {"kid": "x"}}])
def test_impossible_grpo_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        grpo(**wrong)


# -- SDPO --------------------------------------------------------------------------------------------------------------------


def weights(recipe: SDPORecipe, samples: Sequence[Sample]) -> list[float]:
    return [sample.extras.get(Extras.WEIGHT, 1.0) for sample in recipe.assemble(samples, TOOLS)]


@pytest.mark.parametrize(
    ("scores", "expected"), [([1, 0, 1, 0], [1, 1, 1, 1]), ([1, 0, 0, 0], [0, 1, 1, 1]), ([0, 0, 0, 0], [0, 0, 0, 0])]
)
def test_who_has_a_teacher(scores: list[float], expected: list[float]) -> None:
    assert weights(sdpo(), answers(sdpo(), scores)) == expected


def test_the_teacher_reads_the_first_other_correct_answer() -> None:
    samples = sdpo().assemble(answers(sdpo(), [1, 0, 1, 0]), TOOLS)
    shown = ["ab2", "ab0", "ab0", "ab0"]
    for sample, solution in zip(samples, shown, strict=True):
        text = f"ask\n\nCorrect solution:\n\n{solution}\n\nCorrectly solve the original question."
        assert sample.extras[Extras.TEACHER_PROMPT_IDS] == Letters().render([{"role": "user", "content": text}])


def test_siblings_are_of_the_same_group() -> None:
    recipe = sdpo()
    other = [replace(s, id=f"o{s.id}") for s in answers(recipe, [1, 1], group="h")]  # type: ignore[arg-type]
    assert weights(recipe, [*answers(recipe, [0, 0]), *other]) == [0, 0, 1, 1]


def test_feedback_is_read_as_the_settings_say() -> None:
    def texts(use: Any, scores: list[float]) -> list[bool]:
        recipe = sdpo(use_feedback=use)
        made = recipe.assemble(answers(recipe, scores, feedback="too long"), TOOLS)
        heard = Letters().encode("too long")
        prompts = [sample.extras.get(Extras.TEACHER_PROMPT_IDS, []) for sample in made]
        return [any(prompt[i : i + 8] == heard for i in range(len(prompt))) for prompt in prompts]

    assert texts("fallback", [0, 0, 0, 0]) == [True] * 4
    assert texts("fallback", [1, 0, 0, 0]) == [False] * 4
    assert texts("always", [1, 0, 0, 0]) == [False, True, True, True]
    assert texts("never", [0, 0, 0, 0]) == [False] * 4


def test_thinking_is_not_shown_and_long_contexts_are_left_out() -> None:
    assert strip_thinking("<think>a\nb</think>\n\nfour") == "four"
    assert context("q", "s", "f").index("feedback") > context("q", "s", "f").index("Correct solution")
    recipe = sdpo(max_teacher_tokens=40)
    assert weights(recipe, answers(recipe, [1, 0, 1, 0])) == [0, 0, 0, 0]
    assert [s.extras[Extras.WEIGHT] for s in sdpo().assemble(answers(sdpo(), [1, 1, 1, 1]), Tools())] == [0.0] * 4


def distributions(lab: Any, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Whole log-softmaxes at the answer's positions, through transformers' own forward pass."""
    found = []
    for sample in samples:
        ids = torch.tensor([[*sample.tokens.prompt_ids, *sample.tokens.output_ids]])
        with torch.no_grad():
            logits = lab.actor.causal(input_ids=ids).logits[0].double()
        start = len(sample.tokens.prompt_ids) - 1
        found.append(logits[start : start + len(sample.tokens.output_ids)].log_softmax(-1))
    return found


def jsd(s: list[float], t: list[float], alpha: float) -> float:
    if alpha in (0.0, 1.0):
        p, q = (s, t) if alpha else (t, s)
        return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    m = [math.log((1 - alpha) * math.exp(a) + alpha * math.exp(b)) for a, b in zip(s, t, strict=True)]
    to = (math.fsum(math.exp(a) * (a - c) for a, c in zip(x, m, strict=True)) for x in (s, t))
    return (1 - alpha) * next(to) + alpha * next(to)


@pytest.mark.parametrize(("alpha", "top_k"), [(0.5, 8), (1.0, 0), (0.0, 8)])
def test_an_sdpo_step_equals_the_oracle(toy_model: Path, alpha: float, top_k: int) -> None:
    recipe = sdpo(alpha=alpha, top_k=top_k)
    lab = learner(toy_model, recipe.program())
    samples = recipe.assemble(on_policy(lab, answers(recipe, [1, 0, 0, 0])), TOOLS)
    taught = [s for s in samples if s.extras.get(Extras.WEIGHT, 1.0) > 0]
    read = [replace(s, tokens=replace(s.tokens, prompt_ids=tuple(s.extras[Extras.TEACHER_PROMPT_IDS]))) for s in taught]
    total, n = 0.0, 0
    for student, teacher in zip(distributions(lab, taught), distributions(lab, read), strict=True):
        for s, t in zip(student, teacher, strict=True):
            ids = s.topk(top_k).indices if top_k else torch.arange(len(s))
            mine, theirs = s[ids].tolist(), t[ids].tolist()
            if top_k:
                mine.append(math.log1p(-math.fsum(map(math.exp, mine))))
                theirs.append(math.log1p(-math.fsum(map(math.exp, theirs))))
            total, n = total + jsd(mine, theirs, alpha), n + 1
    metrics = lab.step(samples).metrics
    assert metrics["policy_loss"] == pytest.approx(total / n, rel=2e-3, abs=1e-6)
    assert metrics["taught_samples"] == 3 and metrics["distilled_tokens"] == n


def test_sdpo_moves_the_policy_towards_its_teacher_and_the_teacher_follows(toy_model: Path) -> None:
    recipe = sdpo(teacher_rate=0.0)
    lab = learner(toy_model, recipe.program())
    samples = recipe.assemble(answers(recipe, [1, 0, 0, 0]), TOOLS)
    losses = []
    for _ in range(6):
        now = [replace(s, tokens=replace(s.tokens, logprobs=lp)) for s, lp in zip(samples, current(lab, samples), strict=True)]
        losses.append(lab.step(now).metrics["policy_loss"])
    assert losses[-1] < 0.7 * losses[0]
    state = lab.program.state_dict()["teacher"]["average"]
    lab.program.settings = replace(lab.program.settings, teacher_rate=0.5)
    lab.program.teacher.rate = 0.5  # type: ignore[attr-defined]
    before = [tensor.clone() for tensor in state]
    lab.step(now)
    after = lab.program.state_dict()["teacher"]["average"]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def current(lab: Any, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
    """Log-probs under the weights in memory."""
    batch = batching.build(samples, len(samples))
    parts = batch.micros[0].split(lab.policy.score(batch.micros[0]).logprob)
    return [tuple(parts[i].tolist()) for i in range(len(samples))]


def test_the_hybrid_mixes_group_and_teacher(toy_model: Path) -> None:
    mixed = hybrid_advantage(torch.tensor([1.0]), torch.tensor([0.8]), 0.9)
    assert float(mixed) == pytest.approx(0.98)
    recipe = sdpo(hybrid=0.9)
    lab = learner(toy_model, recipe.program())
    report = lab.step(recipe.assemble(on_policy(lab, answers(recipe, [1, 0, 0, 0])), TOOLS))
    assert report.policy_updated and report.metrics["taught_samples"] == 3


def test_a_batch_nobody_can_teach_makes_no_step(toy_model: Path) -> None:
    recipe = sdpo()
    report = learner(toy_model, recipe.program()).step(recipe.assemble(answers(recipe, [0, 0, 0, 0]), TOOLS))
    assert report.policy_updated is False and report.metrics["skipped"] == "nothing_to_distil"

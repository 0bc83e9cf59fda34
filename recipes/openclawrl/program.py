"""OpenClaw-RL's tensor half: the vote as an advantage, and distillation from the policy's base reading the hint.

    L = mean over tokens of  reward_weight * L_ppo(sampled token, A = vote)  +  hint_weight * L_hint
    A is the vote, or with `vote_baseline` the vote minus the batch's mean one
    L_hint, top_k K:  sum over the policy's K likeliest ids v of the clipped surrogate with A_v = w_v * clip(log T_v - log S_v)
    L_hint, top_k 0:  the clipped surrogate of the sampled token with A = clip(log T - log S)

w is the policy's softmax over the K ids; S are the policy's log-probs at the start of the step, recomputed here, since another
program's numbers would move the clip (arXiv:2603.10165; the K ids are those of the weights being trained, not of the sampling).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipes.openclawrl.recipe import TEACHER_PROMPTS
from reef_cli.config.off_policy import OffPolicy
from reef_cli.trainer.batching import Batch, MicroBatch, in_context
from reef_cli.trainer.diagnostics import mean
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.losses import distill
from reef_cli.trainer.losses.policy import Terms, policy_terms
from reef_cli.trainer.model import TokenOutput
from reef_cli.trainer.program import Program, StepReport
from reef_cli.trainer.stepping import step
from reef_cli.trainer.teachers import named

EPS_LOW, EPS_HIGH = 0.2, 0.28
"""Clip of the surrogate over listed ids."""


@dataclass(frozen=True, slots=True)
class ProgramSettings:
    """What the recipe hands over; documented in `recipe.py`."""

    policy_lr: float
    reward_weight: float
    vote_baseline: bool
    hint_weight: float
    top_k: int
    hint_choice: str
    teacher: str
    gap_clip: float
    off_policy: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Lesson:
    """Per action token: the ids `[N, K]` compared, and the policy's and the teacher's log-probs of them."""

    ids: Tensor
    old: Tensor
    teacher: Tensor


class OpenClawRLProgram(Program):
    """One step per batch of judged turns. It has no state: the teacher is frozen, or the policy itself."""

    settings_type = ProgramSettings
    settings: ProgramSettings

    @property
    def off(self) -> OffPolicy:
        return OffPolicy.of(self.settings.off_policy, kind="decoupled", high=1 + EPS_HIGH)

    def reset(self, policy: Policy) -> None:  # noqa: ARG002  a frozen teacher starts from nothing
        self.teacher = named(self.settings.teacher)

    def train(self, policy: Policy, batch: Batch) -> StepReport:
        s = self.settings
        votes = advantages([sample.reward for sample in batch.samples], s.vote_baseline)
        lessons = {id(micro): self._lesson(policy, batch, micro) for micro in batch.micros} if s.hint_weight else {}

        def ids(micro: MicroBatch) -> Tensor:
            own = micro.targets.unsqueeze(-1)
            return torch.cat([own, lessons[id(micro)].ids], -1) if lessons else own

        def terms(micro: MicroBatch, out: TokenOutput) -> Terms:
            reward = policy_terms(self.off, out.logprob, micro.rollout_logprobs, batch.per_token(micro, votes), micro.row)
            if not lessons:
                return Terms(s.reward_weight * reward.loss, reward.masked)
            taught = hint_loss(out.logprobs[:, 1:], lessons[id(micro)], s.gap_clip, weighted=s.top_k > 0)
            return Terms(s.reward_weight * reward.loss + s.hint_weight * taught, reward.masked)

        report = step(policy, batch, self.off, terms, ids=ids)
        return StepReport(report.policy_updated, {**report.metrics, **judged(batch), **self._gap(policy, batch, lessons)})

    def _lesson(self, policy: Policy, batch: Batch, micro: MicroBatch) -> Lesson:
        """What the chosen hint's teacher says, before the step."""
        k = self.settings.top_k
        ids = policy.top(micro, k)[0] if k else micro.targets.unsqueeze(-1)
        old = policy.score(micro, None, ids).logprobs
        prompts = [batch.samples[position].extras[TEACHER_PROMPTS] for position in micro.rows]
        answers, overlaps = [], []
        for number in range(max(map(len, prompts), default=1)):
            # A turn with fewer hints repeats its last one; a repetition never wins over the first of its kind.
            chosen = {position: mine[min(number, len(mine) - 1)] for position, mine in zip(micro.rows, prompts, strict=True)}
            read = in_context(batch, micro, chosen)
            answers.append(policy.score(read, self.teacher, ids).logprobs)
            overlaps.append(distill.overlap(ids, policy.top(read, max(k, 1), self.teacher)[0]))
        best = choose(torch.stack(overlaps), micro, self.settings.hint_choice)
        teacher = torch.stack(answers)[best, torch.arange(len(micro), device=best.device)]
        return Lesson(ids, old, teacher)

    def _gap(self, policy: Policy, batch: Batch, lessons: Mapping[int, Lesson]) -> dict[str, Any]:
        if not lessons:
            return {}
        gaps = [(lesson.teacher - lesson.old).abs().mean(-1).sum().double() for lesson in lessons.values()]
        return {"teacher_gap": float(policy.sum(torch.stack(gaps).sum())) / max(1, batch.tokens)}


def advantages(votes: Sequence[float], baseline: bool) -> list[float]:
    """The votes, minus their mean where there is a `baseline`."""
    level = mean(votes) if baseline else 0.0
    return [vote - level for vote in votes]


def choose(overlaps: Tensor, micro: MicroBatch, how: str) -> Tensor:
    """Which hint teaches each token `[N]`, from overlaps `[H, N]`: the first of the largest, over the answer or per token."""
    if how == "shortest" or len(overlaps) == 1 or not len(micro):
        return torch.zeros(overlaps.shape[1], dtype=torch.long, device=overlaps.device)
    if how == "token":
        return overlaps.argmax(0)
    answers = int(micro.row.max()) + 1
    sums = overlaps.new_zeros((len(overlaps), answers)).index_add(1, micro.row, overlaps)
    return sums.argmax(0)[micro.row]


def hint_loss(current: Tensor, lesson: Lesson, clip: float, *, weighted: bool) -> Tensor:
    """The clipped surrogate towards the teacher `[N]`, `weighted` by the policy's softmax over the listed ids or as it is."""
    if weighted:
        advantage = distill.overlap_advantages(lesson.old, lesson.teacher, clip)
    else:
        advantage = (lesson.teacher - lesson.old).clamp(-clip, clip).detach()
    return distill.overlap_loss(current, lesson.old, advantage, EPS_LOW, EPS_HIGH)


def judged(batch: Batch) -> dict[str, float]:
    """What the judge said about this batch: shares of good and bad turns, and of those with a hint."""
    rewards = [sample.reward for sample in batch.samples]
    return {
        "good_share": mean([float(reward > 0) for reward in rewards]),
        "bad_share": mean([float(reward < 0) for reward in rewards]),
        "hinted_share": mean([float(bool(sample.extras.get("hints"))) for sample in batch.samples]),
    }

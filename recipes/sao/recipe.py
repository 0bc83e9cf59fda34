"""SAO (Single-rollout Asynchronous Optimization): online reinforcement learning from one scored answer per prompt.

This half decides which reports train: exactly one receipt, a finite score, and a trace whose tokens and log-probs are the
engine's own. The tensor half is `program.py`. Source: arXiv:2607.07508.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from reef_cli.core.types import Cadence, Inference, Report, Sample, Surface
from reef_cli.learning.contract import Acquisition, ProgramSpec, RecipeSettings, Refusal, Signal, Target
from reef_cli.learning.samples import scored_sample
from reef_cli.learning.settings import check


@dataclass(frozen=True, slots=True)
class SAOSettings(RecipeSettings):
    """Settings of SAO beside those of every recipe."""

    batch_size: int = 128
    """Samples per training step; 1 is a smoke test (the critic then sees a single sample and the advantages are noise)."""

    policy_lr: float = 2e-4
    """Learning rate of the LoRA adapter; use about 1e-6 with `trainer.method: full`."""

    critic_lr: float = 1e-3
    """Learning rate of the critic's head."""

    eps_low: float = 0.3
    """Tokens whose importance ratio is at most 1 - eps_low do not train (0.8 for coding and agents)."""

    eps_high: float = 5.0
    """Tokens whose importance ratio is at least 1 + eps_high do not train (3.0 for coding and agents)."""

    critic_steps: int = 2
    """Critic updates per policy update."""

    critic_only_steps: int = 2
    """First steps of a scenario that train the critic alone and publish nothing (10 in the paper, at batch 128)."""

    critic_width: int = 128
    """Hidden units of the critic's head."""

    level_decay: float = 0.5
    """Decay per step of the running mean of rewards the critic is built around; 1 switches it off (the paper's zero start)."""

    alpha_lambda: float = 1.5
    """Length-adaptive GAE: lambda = 1 - 1 / (alpha_lambda * response tokens)."""

    gamma: float = 1.0
    """Discount per action token."""

    use_critic: bool = True
    """Whether the critic is the baseline; off is an ablation (plain reward)."""

    use_mask: bool = True
    """Whether ratios are masked; off is an ablation (plain importance weights)."""

    min_ess: float = 0.3
    """Smallest effective sample size, as a share of the tokens, for which the policy is updated."""

    max_masked: float = 0.5
    """Largest share of masked tokens for which the policy is updated."""

    max_temperature: float = 2.0
    """Samples drawn hotter than this are refused; ratios are computed at the temperature of each sample."""

    def __post_init__(self) -> None:
        learning = ("batch_size", "policy_lr", "critic_lr", "critic_steps", "critic_width")
        check(
            self,
            positive=(*learning, "eps_low", "eps_high", "gamma", "alpha_lambda"),
            natural=("critic_only_steps",),
            shares=("eps_low", "gamma", "level_decay"),
        )


_PROGRAM_FIELDS = (
    "policy_lr", "critic_lr", "eps_low", "eps_high", "critic_steps", "critic_only_steps", "critic_width",
    "level_decay", "alpha_lambda", "gamma", "use_critic", "use_mask", "min_ess", "max_masked",
)  # fmt: skip


class SAORecipe:
    """One rollout per prompt, a critic as baseline, a hard two-sided mask against stale tokens."""

    name: ClassVar[str] = "sao"
    title: ClassVar[str] = "Single-rollout asynchronous optimization: learn from scored answers while serving"
    surface: ClassVar[Surface] = Surface.WEIGHTS
    cadence: ClassVar[Cadence] = Cadence.ROLLING
    signal: ClassVar[Signal] = Signal("one score per answer", "the application")
    acquisition: ClassVar[Acquisition] = Acquisition.REACTIVE
    target: ClassVar[Target] = Target.MODEL
    settings_type: ClassVar[type[RecipeSettings]] = SAOSettings

    def __init__(self, settings: SAOSettings) -> None:
        self.settings = settings

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """One sample per scored receipt, or a stable reason why there is none."""
        return scored_sample(report, records, step_of, max_temperature=self.settings.max_temperature)

    def program(self) -> ProgramSpec:
        """The trainer half with its settings."""
        settings = asdict(self.settings)
        return ProgramSpec("recipes.sao.program:SAOProgram", {name: settings[name] for name in _PROGRAM_FIELDS})

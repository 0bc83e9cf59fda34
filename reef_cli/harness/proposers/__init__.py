"""The shipped proposers: `RepeatedFeedback` needs no model, `LanguageModel` asks one."""

from reef_cli.harness.proposers.feedback import RepeatedFeedback
from reef_cli.harness.proposers.model import LanguageModel

__all__ = ["LanguageModel", "RepeatedFeedback"]

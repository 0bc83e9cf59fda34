"""SDFT's tensor half: the shared distillation step; its defaults are forward KL over the whole vocabulary."""

from reef_cli.trainer.distilling import DistillProgram


class SDFTProgram(DistillProgram):
    """mean over tokens of min(r, 2) * KL(teacher || policy), after the first `skip_tokens` of each answer."""

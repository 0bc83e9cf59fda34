"""`reef demo` end to end on the tiny model: every scene is asked, learns, is judged, and goes back."""

from pathlib import Path

import pytest

from reef_cli.demo.run import play
from reef_cli.demo.scenes import SCENES, Scene
from reef_cli.demo.show import Show

pytestmark = pytest.mark.slow

FEW = {
    "reef.batch_size": "4",
    "reef.policy_lr": "3e-3",
    "engine.threads": "1",
    "trainer.threads": "1",
    "evaluation.limit": "4",
    "evaluation.smoke_items": "0",
    "evaluation.max_kl": "1000",
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_a_scene_plays_to_its_end(scene: Scene, tiny_model: Path, tmp_path: Path) -> None:
    result = play(tmp_path, Show(quiet=True), scene, steps=2, model=str(tiny_model), overrides=FEW)
    assert result.steps >= 2 and result.asked >= 8 and len(result.rewards) >= 2
    assert all(0 <= share <= 1 for share in result.rewards)
    assert result.release_after != result.release_before and result.release_rolled_back != result.release_before
    assert result.same_tokens_after_rollback and result.rolled_back == result.before

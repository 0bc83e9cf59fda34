"""What the demo shows: that its users say what the recipes' judges understand, and that questions are held out."""

import io

import pytest
from rich.console import Console

from recipes.openclawrl.judge import Exchange, by_words
from reef_cli.config.load import load
from reef_cli.core.errors import RecipeNotFound
from reef_cli.demo.scenes import SCENES, Scene, scene
from reef_cli.demo.show import Show, sparkline
from reef_cli.evaluation.grade import grade_now
from reef_cli.evaluation.suite import Suite


@pytest.mark.parametrize("chosen", SCENES.values(), ids=SCENES)
def test_a_scene_stands_on_its_example(chosen: Scene) -> None:
    found = load([], {}, chosen.folder / "demo.yaml").recipe
    assert found is not None and found.name == chosen.recipe
    suite = Suite.load(chosen.folder / "suite.jsonl")
    asked, held_out = suite.select("development").items, suite.select("heldout").items
    assert len(asked) >= 16 and len(held_out) >= 16
    assert not {item.messages[-1]["content"] for item in asked} & {item.messages[-1]["content"] for item in held_out}


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("A volcano is an opening in the ground from which hot rock comes.", 1),
        ("A volcano is a mountain. It may erupt", -1),
        ("A volcano is an opening in the", -1),
        ("A volcano " + "very " * 30 + "is hot.", -1),
    ],
)
async def test_the_judge_understands_what_the_user_says(answer: str, score: int) -> None:
    """Thanks are a good vote; the request is a bad one, and the hint its teacher reads."""
    chosen = scene("openclawrl")
    item = Suite.load(chosen.folder / "suite.jsonl").items[0]
    assert chosen.says is not None
    said = chosen.says.reply(grade_now(item.grader, answer).score)
    opinion = await by_words(Exchange("What is a volcano?", answer, said, "user"))
    assert opinion.score == score
    assert opinion.accepted(3) == ((chosen.says.request,) if score < 0 else ())


def test_a_demonstration_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(RecipeNotFound) as caught:
        scene("grpo")
    assert caught.value.hint == "reef demo --recipe sao or openclawrl"


def test_votes_are_shown_as_shares_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes of -1 and 1 make a curve from nobody to everybody."""
    chosen = scene("openclawrl")
    assert [chosen.share(vote) for vote in (-1.0, 0.0, 1.0)] == [0.0, 0.5, 1.0]
    assert [scene("sao").share(reward) for reward in (0.0, 0.25, 1.0)] == [0.0, 0.25, 1.0]
    out = io.StringIO()
    monkeypatch.setattr("reef_cli.demo.show.Console", lambda **_: Console(file=out, width=200))
    show = Show(curve=chosen.curve, share=chosen.share)
    state = {"rewards": [-1.0, 0.0, 1.0], "head": "r3", "state": "collecting", "counts": {"queued": 2}}
    show.learning(3, 12, state, 0.0)
    assert f"acceptance {sparkline([0.0, 0.5, 1.0])} 1.00" in out.getvalue() and "step 3/12" in out.getvalue()

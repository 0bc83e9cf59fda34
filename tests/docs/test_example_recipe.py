"""The recipe on the recipes page: found and loaded as a person's own, admits what it says, and makes a real step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks, files

ADMIT = """
import sys
from pathlib import Path
from reef_cli.config.load import load
from reef_cli.config.recipes import scan_recipes
from reef_cli.core.types import Inference, Report, Sample, TokenSpan, TokenTrace
from reef_cli.learning.contract import Refusal

loaded = load([], {}, Path("serve.yaml"))
recipe = loaded.make_recipe()
assert recipe.settings.threshold == 1.0 and recipe.settings.batch_size == 4
assert dict(scan_recipes())["recipes.liked.recipe:LikedRecipe"] is type(recipe)
assert "recipes.sao.recipe:SAORecipe" in dict(scan_recipes())

spans = (TokenSpan("s@r3-0a1b2c3d", 0, 1), TokenSpan("s@r4-0a1b2c3d", 1, 2))
trace = TokenTrace((1, 2), (3, 4), (-0.5, -0.1), (1, 1), spans)
record = Inference("i", "s", 0.0, "chat", "m", b"{}", [], {"role": "assistant", "content": "x"}, tokens=trace)
steps = {"s@r3-0a1b2c3d": 3, "s@r4-0a1b2c3d": 4}
report = lambda score: Report("r", "s", 1.0, ("i",), score=score)
sample = recipe.admit(report(1.0), [record], steps)
assert isinstance(sample, Sample) and sample.step == 3 and sample.reward == 1.0 and sample.records == ("i",)
assert recipe.admit(report(0.5), [record], steps) == Refusal("not_liked")
assert recipe.admit(report(1.0), [record, record], steps) == Refusal("needs_single_receipt")
assert "torch" not in sys.modules
print(recipe.program().path)
"""
STEP = """
import sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from reef_cli.config.schema import TrainerSettings
from reef_cli.core.types import Sample, TokenSpan, TokenTrace
from reef_cli.trainer.learner import Learner
from reef_cli.trainer.process import join_alone

sys.path.append(".")
torch.manual_seed(1)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("model")
join_alone(threads=1)
settings = TrainerSettings(rank=4, alpha=8.0, device="cpu", threads=1, micro_batch=2)
learner = Learner(Path("model"), "recipes.liked.program:LikedProgram", {"lr": 1e-2}, settings, 0)
trace = TokenTrace((1, 2, 3), (4, 5), (-4.0, -4.0), (1, 1), (TokenSpan("base", 0, 2),))
batch = [Sample(f"s{i}", (f"r{i}",), trace, 1.0, ("base",), 0, 0.0) for i in range(2)]
resume, losses = None, []
for step in range(3):
    done = learner.train("s", step, None, resume, batch, Path(f"out{step}"))
    resume = Path(done["checkpoint"]) if done.get("checkpoint") else resume
    losses.append(done["metrics"]["policy_loss"])
assert done["metrics"]["policy_updated"] is True
assert losses[2] < losses[0], losses
assert (Path(done["directory"]) / "adapter_model.safetensors").is_file()
print(losses)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A person's working folder with the page's files."""
    for name, text in files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    settings = next(block.text for block in blocks("yaml") if "recipes.liked" in block.text)
    (tmp_path / "serve.yaml").write_text(settings, encoding="utf-8")
    return tmp_path


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False, env=environment(), timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def environment() -> dict[str, str]:
    """Sleeping OpenMP threads, which leave a busy machine alone."""
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}


def test_it_loads_and_admits(folder: Path) -> None:
    assert run(ADMIT, folder).strip() == "recipes.liked.program:LikedProgram"


@pytest.mark.slow
def test_its_program_makes_steps_that_lower_the_loss(folder: Path) -> None:
    run(STEP, folder)


def test_it_is_as_short_as_the_readme_says() -> None:
    lines = [len(text.strip().splitlines()) for text in files().values()]
    assert len(lines) == 2 and sum(lines) <= 62

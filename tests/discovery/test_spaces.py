"""Programs in the sandbox, guidance for an executor, and the pictures and files of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from reef_cli.core.errors import ConfigError, ReefError, UpstreamError
from reef_cli.discovery import export, pictures, problems
from reef_cli.discovery.archive import Archive
from reef_cli.discovery.guidance import GuidanceSpace, guidance_of
from reef_cli.discovery.packing.circles import PackingProblem
from reef_cli.discovery.problem import Ask, State, Unusable
from reef_cli.discovery.programs import ProgramSpace, program_of
from reef_cli.discovery.run import Plan, Run
from reef_cli.discovery.verify import verify
from reef_cli.sandbox import bubblewrap
from reef_cli.sandbox.program import Limits
from tests.discovery.test_run import climbing
from tests.discovery.toy import Adding, Memory, Numbers

START = State(1, None, 2.5, True, [[0.5, 0.5, 0.5]], "ROWS 5 5")
FOUND = State(2, 1, 2.5, False, [[0.5, 0.5, 0.5]], "print(1)", "tried three starts")
sandboxed = pytest.mark.skipif(bubblewrap.problem() is not None, reason=str(bubblewrap.problem()))


def fenced(code: str) -> str:
    return f"Here it is.\n```python\n{code}\n```\nDone."


SPACE = ProgramSpace("Fill the square.", {}, "Print it.", Limits(seconds=10.0))


@sandboxed
def test_a_program_runs_and_its_last_line_is_the_solution() -> None:
    code = "print('tried', SEED)\nprint('[[0.5, 0.5, 0.5]]')"
    made = SPACE.make(START, fenced(code), 7)
    assert made.solution == [[0.5, 0.5, 0.5]] and made.text == code and made.summary == "tried 7"


@sandboxed
def test_a_packing_program_has_numpy_and_scipy() -> None:
    code = (
        "import json, numpy as np\nfrom scipy.optimize import linprog\n"
        "r = linprog([-1, -1], [[1, 1]], [np.sqrt(2) * (1 - 0.2928932188)], bounds=[(0, .2928932188)] * 2).x\n"
        "print(json.dumps([[r[0], r[0], r[0]], [1 - r[1], 1 - r[1], r[1]]]))"
    )
    problem = PackingProblem(2)
    made = problem.space("programs").make(START, fenced(code), 0)
    assert verify(problem.verifier, made.solution).value == pytest.approx(0.585786, abs=1e-5)


@sandboxed
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(3)", "program_failed"),
        ("1/0", "program_failed"),
        ("print('hello')", "output_is_no_solution"),
        ("import socket; socket.create_connection(('127.0.0.1', 80), 1)", "program_failed"),
        ("open('/reef/x', 'w')", "program_failed"),
    ],
)
def test_programs_that_give_nothing_have_a_stable_reason(code: str, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        SPACE.make(START, fenced(code), 0)


@sandboxed
def test_a_program_has_limits_and_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "secret")
    short = ProgramSpace("", {}, "", Limits(seconds=1.0))
    with pytest.raises(Unusable, match="program_too_slow"):
        short.make(START, fenced("while True: pass"), 0)
    made = SPACE.make(START, fenced("import json, os; print(json.dumps(dict(os.environ)))"), 0)
    assert "secret" not in json.dumps(made.solution)


@pytest.mark.parametrize("text", ["", "print(1)", "```python\n\n```", "```python\n" + "x" * 100_001 + "\n```"])
def test_text_without_a_program_never_runs(text: str) -> None:
    with pytest.raises(Unusable):
        program_of(text)


def test_a_found_program_is_shown_with_its_output_and_a_first_solution_is_not_taken_for_one() -> None:
    first, later = SPACE.ask(START), SPACE.ask(FOUND)
    assert first.chat and "ROWS" not in first.prompt and "2.5" in first.prompt
    assert "print(1)" in later.prompt and "tried three starts" in later.prompt


class Chatting(Adding):
    def ask(self, parent: State) -> Ask:
        return replace(super().ask(parent), chat=True)


# -- guidance --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "advice"),
    [("<guidance>more rows</guidance>", "more rows"), ("Well.\n<guidance> a\n b </guidance>\n", "a b")],
)
def test_one_terminal_block_is_guidance(text: str, advice: str) -> None:
    assert guidance_of(text) == advice


@pytest.mark.parametrize(
    "text",
    [
        "", "more rows", "<guidance></guidance>", "<guidance> </guidance>", "<guidance>a</guidance> and so on",
        "<guidance>a</guidance><guidance>b</guidance>", "<guidance>a", "</guidance>a<guidance>",
    ],
)  # fmt: skip
def test_anything_else_asks_no_executor(text: str) -> None:
    def executor(ask: Ask, seed: int) -> str:
        raise AssertionError("asked")

    with pytest.raises(Unusable, match="guidance"):
        GuidanceSpace(Chatting(), executor, "Climb.").make(FOUND, text, 0)


def test_the_guide_sees_the_summary_only_and_the_executor_text_and_advice() -> None:
    asked: list[tuple[Ask, int]] = []

    def executor(ask: Ask, seed: int) -> str:
        asked.append((ask, seed))
        return "thinking <solution>0.25</solution><summary>added a quarter</summary>"

    space = GuidanceSpace(Chatting(), executor, "Climb.")
    asked_guide = space.ask(FOUND)
    assert asked_guide.chat and space.name == "guidance-add"
    assert "tried three starts" in asked_guide.prompt and "print(1)" not in asked_guide.prompt
    made = space.make(FOUND, "<guidance>a little</guidance>", 5)
    assert made.solution == 2.75 and made.summary == "added a quarter"
    assert asked[0][1] == 5 and "Advice: a little" in asked[0][0].prompt and "2.5 plus" in asked[0][0].prompt


def test_a_small_guide_gets_the_block_opened_and_a_bare_answer_of_a_small_executor_is_the_solution() -> None:
    space = GuidanceSpace(Adding(), lambda ask, seed: "0.5", "Climb.")
    ask = space.ask(FOUND)
    assert not ask.chat and ask.prompt.endswith("<guidance>") and "</guidance>" in ask.stop
    made = space.make(FOUND, "half", 0)
    assert made.solution == 3.0 and made.summary.startswith("half")
    with pytest.raises(Unusable, match="empty_guidance"):
        space.make(FOUND, "  ", 0)


def test_a_failing_executor_is_an_outage(tmp_path: Path) -> None:
    def executor(ask: Ask, seed: int) -> str:
        raise UpstreamError("gone")

    archive = Archive(tmp_path / "archive.db")
    run = Run(
        Numbers(tmp_path), GuidanceSpace(Adding(), executor, "Climb."),
        Memory(lambda ask, seed: "up", 6), archive, Plan("test", 2, 3),
    )  # fmt: skip
    run.begin()
    with pytest.raises(UpstreamError):
        run.step()
    assert archive.rollouts(1) == []
    archive.close()


# -- results ---------------------------------------------------------------------------------------------------------------


def test_results_are_verified_again_and_written(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive.db")
    problem = Numbers(tmp_path)
    with pytest.raises(ReefError, match="no solution"):
        export.summary(problem, archive)
    run = Run(problem, problem.space("add"), Memory(climbing, 6), archive, Plan("test", 2, 3))
    run.begin()
    run.step()
    found = export.summary(problem, archive)
    assert found["valid"] and found["strict"] == found["solution"] == found["history"][-1]["best"]
    assert found["origin"]["step"] == 1 and found["origin"]["receipt"].startswith("receipt-")
    files = export.write(found, problem, tmp_path / "out")
    assert json.loads(files["best.json"].read_text())["strict"] == found["strict"]
    assert (
        files["curve.svg"].read_text().startswith("<svg") and f"<b>{found['solution']}</b>" in files["report.html"].read_text()
    )
    archive.close()


def test_pictures_hold_for_any_history() -> None:
    assert pictures.bars([]) == "" and pictures.chart([]) == "" and pictures.bars([1.0, 1.0]) == "▁▁"
    assert pictures.bars([0.0, 1.0, 2.0]) == "▁▅█"
    lines = pictures.chart([1.0, 2.0, 2.0, 3.0], height=5).splitlines()
    assert "3.000000" in lines[0] and lines[0].rstrip().endswith("●") and "1.000000" in lines[4] and "step 1 to 4" in lines[-1]
    assert len(pictures.chart([float(i) for i in range(500)], width=60).splitlines()[0]) <= 80
    assert pictures.curve([], "none").startswith("<svg")
    assert "&lt;b&gt;" in pictures.page("<b>", {"x": "<i>"}, [{"best": 1.0, "top": 0.0}], "")


def test_a_packing_is_drawn() -> None:
    assert '<circle cx="0.250000" cy="0.750000"' in PackingProblem(1).draw([[0.25, 0.25, 0.25]])


def test_problems_have_names() -> None:
    assert problems.find("packing-32", {"tolerance": 1e-9}).name == "packing-32"
    for wrong in ("packing", "packing-0", "nothing:Here", "json:dumps", "reef_cli.discovery.problem:State"):
        with pytest.raises(ConfigError):
            problems.find(wrong, {})

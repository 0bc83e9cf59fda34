"""A discovery run: steps of groups of tries, each verified, archived, reported and learned from, until told to stop.

A step is a grid: for each of `groups` parents `rollouts` answers. The order is always the same: answer (its receipt is durable
at the server), solution, verdict, archive, report; then the training step, then the commit that pairs archive and head. A run
killed anywhere repeats nothing that is in the archive. Outages stop the run; a bad answer is a score of 0.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from reef_cli.core.errors import HeadMoved
from reef_cli.discovery.archive import Archive, Rollout, Step
from reef_cli.discovery.desk import Proposal, Standing
from reef_cli.discovery.problem import Ask, Made, Problem, Space, State, Unusable, Verdict
from reef_cli.discovery.verify import Limits, verify

KNOWN = "known"
"""Reason of a solution that is in the archive already: valid, but no discovery; it scores 0."""


class Served(Protocol):
    """The served model as a run sees it: asked, told scores, awaited (`desk.Desk`)."""

    def propose(self, ask: Ask, seed: int) -> Proposal: ...

    def standing(self) -> Standing: ...

    def same_weights(self, left: str | None, right: str | None) -> bool: ...

    def report(self, rollout: Rollout, run: str, *, learn: bool) -> str | None: ...

    def await_trained(
        self, done_before: int, count: int, timeout_s: float, on_wait: Callable[[Standing], None] = ...
    ) -> Standing: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run searches. `initial_only` starts every group from a first solution (best of N)."""

    name: str
    groups: int
    rollouts: int
    learn: bool = True
    initial_only: bool = False
    c: float = 1.0
    seed: int = 0
    concurrency: int = 16
    train_timeout_s: float = 3600.0
    limits: Limits = field(default_factory=Limits)

    @property
    def tries(self) -> int:
        return self.groups * self.rollouts


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands. `phase` is `search` or `train`."""

    step: int
    phase: str
    done: int
    total: int
    best: float
    note: str = ""


class Run:
    """Drives one archive. `watch` hears of every try."""

    def __init__(
        self,
        problem: Problem,
        space: Space,
        served: Served,
        archive: Archive,
        plan: Plan,
        watch: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._problem, self._space, self._served, self._archive = problem, space, served, archive
        self.plan = plan
        self._watch = watch
        self._stop = threading.Event()

    def begin(self, *, adopt_head: bool = False) -> None:
        """Make or check the archive. Raises `HeadMoved` when the server's head is not the one the archive is paired with."""
        plan = self.plan
        self._archive.begin(
            {"problem": self._problem.name, "verifier": [str(part) for part in self._problem.verifier][1:],
             "space": self._space.name, "seed": plan.seed, "groups": plan.groups, "rollouts": plan.rollouts}
        )  # fmt: skip
        if not self._archive.nodes()[0]:
            starts = self._problem.starts(plan.groups, plan.seed)
            self._archive.add_starts([(made, self._verify(made)) for made in starts])
        if plan.learn:
            self._pair(adopt_head)

    def _pair(self, adopt: bool) -> None:
        latest = self._archive.latest()
        if latest is None:
            return
        head = self._served.standing().head
        if latest.committed:
            expected = latest.committed_head
        elif all(rollout.reported for rollout in self._tries(latest)) and len(self._tries(latest)) == self.plan.tries:
            return  # the grid is complete: its training may or may not have moved the head
        else:
            expected = latest.head
        if self._served.same_weights(head, expected):
            return
        if not adopt:
            raise HeadMoved(
                f"this run was paired with release {expected}; the server serves {head}",
                why="its archive and the model would no longer belong together",
                hint="roll back to that release, or go on with this one: --adopt-head",
                expected=expected,
                head=head,
            )
        self._archive.commit(latest.step, head, {**latest.detail, "adopted": head})

    def step(self) -> Mapping[str, Any]:
        """One whole step, or the rest of one that was cut short. The row of the history it makes."""
        plan = self.plan
        before = self._served.standing() if plan.learn else None
        step = self._archive.next_step(
            plan.groups,
            before.head if before else None,
            c=plan.c,
            initial_only=plan.initial_only,
            detail={"samples_done": before.samples_done} if before else {},
        )
        self._search(step)
        head, detail = self._train(step)
        self._archive.commit(step.step, head, {**step.detail, **detail})
        return self._archive.history()[-1]

    def stop(self) -> None:
        """Begin no more tries; those under way end and are kept."""
        self._stop.set()

    # -- search --------------------------------------------------------------------------------------------------------

    def _search(self, step: Step) -> None:
        there = {(one.group, one.rollout) for one in self._tries(step)}
        grid = [(g, r) for g in range(len(step.parents)) for r in range(self.plan.rollouts)]
        missing = [place for place in grid if place not in there]
        known = self._archive.values()
        parents = {number: self._archive.state(number) for number in set(step.parents)}
        self._tell(step, "search", len(there))
        with ThreadPoolExecutor(self.plan.concurrency, thread_name_prefix="try") as pool:
            tries = [pool.submit(self._try, step, parents[step.parents[g]], g, r, known) for g, r in missing]
            try:
                for _ in self._ended(tries):
                    self._tell(step, "search", len(self._tries(step)))
            except BaseException:
                self.stop()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _ended(self, tries: list[Future[None]]) -> Any:
        """Wait for the tries, looking up often enough for Ctrl-C and progress; raises what one of them raised."""
        left: set[Future[None]] = set(tries)
        while left:
            done, left = wait(left, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            yield len(left)

    def _try(self, step: Step, parent: State, group: int, rollout: int, known: list[float]) -> None:
        if self._stop.is_set():
            return
        seed = self._seed(step.step, group, rollout)
        proposal = self._served.propose(self._space.ask(parent), seed)
        made, verdict = self._judge(parent, proposal.text, seed)
        copy = verdict.valid and any(self._problem.same(verdict.value, value) for value in known)
        score, reason = (0.0, KNOWN) if copy else (verdict.value if verdict.valid else 0.0, verdict.reason)
        row = Rollout(step.step, group, rollout, parent.id, proposal.text, score, verdict.valid, reason, proposal.receipt)
        self._archive.record(row, (made, verdict) if made is not None and verdict.valid and not copy else None)

    def _judge(self, parent: State, text: str, seed: int) -> tuple[Made | None, Verdict]:
        try:
            made = self._space.make(parent, text, seed)
        except Unusable as error:
            return None, Verdict(False, str(error))
        return made, self._verify(made)

    def _verify(self, made: Made) -> Verdict:
        return verify(self._problem.verifier, made.solution, self.plan.limits)

    def _seed(self, *place: int) -> int:
        text = "/".join(map(str, (self.plan.seed, *place)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    # -- learning ------------------------------------------------------------------------------------------------------

    def _train(self, step: Step) -> tuple[str | None, dict[str, Any]]:
        """Report what is not reported yet and wait for the step; the head then, and what to remember."""
        refused: dict[str, int] = {}
        for rollout in self._tries(step):
            if rollout.receipt is None:
                refused["no_receipt"] = refused.get("no_receipt", 0) + 1
                continue
            if rollout.reported and not self.plan.learn:
                continue
            reason = self._served.report(rollout, self.plan.name, learn=self.plan.learn)
            self._archive.reported(rollout)
            if reason is not None and self.plan.learn:
                refused[reason] = refused.get(reason, 0) + 1
        if not self.plan.learn:
            return None, {}
        if refused:
            return self._served.standing().head, {"untrained": refused}
        before = int(step.detail.get("samples_done", 0))
        after = self._served.await_trained(
            before, self.plan.tries, self.plan.train_timeout_s, lambda now: self._tell(step, "train", 0, now.phase)
        )
        return after.head, {"trained": not self._served.same_weights(after.head, step.head)}

    def _tries(self, step: Step) -> list[Rollout]:
        return self._archive.rollouts(step.step)

    def _tell(self, step: Step, phase: str, done: int, note: str = "") -> None:
        best = self._archive.best()
        self._watch(Progress(step.step, phase, done, self.plan.tries, best.value if best else 0.0, note))

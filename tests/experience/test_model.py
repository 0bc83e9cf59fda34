"""Random interleavings of everything a client may do, against a model in a few dictionaries."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from reef_cli.core.errors import ContentConflict, InvalidReference
from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Inference, Report
from reef_cli.experience.log import ExperienceLog

scenarios = st.sampled_from(["a", "b"])
words = st.sampled_from(["yes", "no", "why", "päivää\u2028", 'quo"te'])


class Experience(RuleBasedStateMachine):
    """Appends, conversations, reports, duplicates, conflicts, reopenings: the log agrees with the model at every step."""

    stored = Bundle("stored")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.loop = asyncio.new_event_loop()
        self.log = ExperienceLog.open(self.folder / "x.db")
        self.order: dict[str, list[str]] = {"a": [], "b": []}
        self.records: dict[str, Inference | Report] = {}

    def do(self, *work: Any) -> list[Any]:
        async def together() -> list[Any]:
            return await asyncio.gather(*work, return_exceptions=True)

        return self.loop.run_until_complete(together())

    @initialize()
    def begin(self) -> None:
        self.do(self.log.scenarios.ensure("a"), self.log.scenarios.ensure("b"))

    def exchange(self, scenario: str, messages: list[dict[str, Any]], session: str | None, answer: str) -> Inference:
        return Inference(
            id=RecordId(new_id()),
            scenario=scenario,
            created_at=float(len(self.records)),
            dialect="chat",
            model="m",
            request=orjson.dumps({"messages": messages, "tools": ["x" * 300]}),
            messages=messages,
            response={"role": "assistant", "content": answer},
            session=session,
        )

    def keep(self, record: Inference | Report) -> None:
        self.records[record.id] = record
        self.order[record.scenario].append(record.id)

    @rule(target=stored, scenario=scenarios, said=words, answer=words, session=st.none() | st.sampled_from(["x", "y"]))
    def start(self, scenario: str, said: str, answer: str, session: str | None) -> Inference:
        record = self.exchange(scenario, [{"role": "user", "content": said}], session, answer)
        assert self.do(self.log.append(record)) == [None]
        self.keep(record)
        return record

    @rule(target=stored, before=stored, said=words, answer=words)
    def go_on(self, before: Inference, said: str, answer: str) -> Inference:
        messages = [*before.messages, dict(before.response or {}), {"role": "user", "content": said * 50}]
        record = self.exchange(before.scenario, messages, before.session, answer)
        assert self.do(self.log.append(record)) == [None]
        self.keep(record)
        with self.log.read() as connection:
            row = connection.execute("SELECT parent, session_id FROM records WHERE id = ?", (record.id,)).fetchone()
            parent = connection.execute("SELECT id, session_id FROM records WHERE seq = ?", (row[0],)).fetchone()
        # The parent is a record with the same conversation and answer, in the same session.
        found = self.records[parent[0]]
        assert isinstance(found, Inference)
        assert (found.messages, found.response, row[1]) == (before.messages, before.response, parent[1])
        return record

    @rule(several=st.lists(st.tuples(scenarios, words), min_size=2, max_size=8))
    def at_once(self, several: list[tuple[str, str]]) -> None:
        records = [self.exchange(scenario, [{"role": "user", "content": said}], None, "ok") for scenario, said in several]
        assert self.do(*(self.log.append(record) for record in records)) == [None] * len(records)
        for record in records:
            self.keep(record)

    @rule(cited=st.lists(stored, min_size=1, max_size=3), scenario=scenarios, score=st.floats(-1, 1), double=st.booleans())
    def report(self, cited: list[Inference], scenario: str, score: float, double: bool) -> None:
        report = Report(RecordId(new_id()), scenario, 1.0, tuple(record.id for record in cited), score=score)
        outcomes = self.do(self.log.report(report), *([self.log.report(report)] if double else []))
        good = len(set(report.references)) == len(cited) and all(record.scenario == scenario for record in cited)
        if good:
            assert outcomes == [True, False][: len(outcomes)]
            self.keep(report)
        else:
            assert all(isinstance(outcome, InvalidReference) for outcome in outcomes)

    @rule(known=stored, same=st.booleans())
    def resend(self, known: Inference, same: bool) -> None:
        again = known if same else self.exchange(known.scenario, [{"role": "user", "content": "changed"}], None, "x")
        outcome = self.do(self.log.append(again if same else Inference(**{**_fields(again), "id": known.id})))[0]
        assert outcome is None if same else isinstance(outcome, ContentConflict)

    @rule(known=consumes(stored), good=st.booleans())
    def batch(self, known: Inference, good: bool) -> None:
        record = self.exchange(known.scenario, [{"role": "user", "content": "imported"}], None, "x")
        cited = record.id if good else RecordId("nothing")
        report = Report(RecordId(new_id()), known.scenario, 2.0, (cited,), score=1.0)
        outcome = self.do(self.log.import_batch([known, record, report]))[0]
        if good:
            assert outcome == [False, True, True]
            self.keep(record)
            self.keep(report)
        else:
            assert isinstance(outcome, InvalidReference)

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = ExperienceLog.open(self.folder / "x.db")

    @invariant()
    def the_log_is_the_model(self) -> None:
        for scenario, ids in self.order.items():
            if self.log.scenarios.find(scenario) is None:
                continue
            rows = self.log.page(scenario, limit=1000)
            assert [row.id for row in rows] == ids
            counts = self.log.counts(scenario)
            assert counts["records"] == len(ids)
            for identifier in ids[-3:]:
                assert self.log.get(scenario, identifier) == self.records[identifier]
            reports = [self.records[identifier] for identifier in ids if isinstance(self.records[identifier], Report)]
            assert [report for _, report in self.log.reports_after(scenario, 0, 1000)] == reports

    def teardown(self) -> None:
        for scenario, ids in self.order.items():
            for identifier in ids:
                assert self.log.get(scenario, identifier) == self.records[identifier]
            in_sessions = [
                turn.row.id
                for row in (self.log.sessions(scenario) if ids else [])
                for tree in [self.log.session_tree(scenario, row.session)]
                for turn in [*(turn for branch in tree.branches for turn in branch.turns), *tree.retries]
            ]
            # Every exchange is in exactly one place of exactly one session.
            assert sorted(in_sessions) == sorted(i for i in ids if isinstance(self.records[i], Inference))
        self.log.close()
        self.loop.close()
        shutil.rmtree(self.folder)


def _fields(record: Inference) -> dict[str, Any]:
    return {name: getattr(record, name) for name in Inference.__dataclass_fields__}


TestExperience: Callable[..., Any] = pytest.mark.filterwarnings("ignore::ResourceWarning")(Experience.TestCase)
Experience.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)

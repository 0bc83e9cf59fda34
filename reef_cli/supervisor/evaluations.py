"""Evaluations a person asks for: a release (or several) on a suite, answered like clients are answered.

`POST /reef/scenarios/{s}/evaluate` and `reef eval` come here. One evaluation runs at a time; serving goes on beside it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.errors import SuiteNotFound
from reef_cli.core.ids import ReleaseId
from reef_cli.core.ports import Answering, Publishing
from reef_cli.core.types import Release
from reef_cli.evaluation.run import run_suite
from reef_cli.evaluation.suite import Suite


class Evaluations:
    """Runs suites against releases of this deployment."""

    def __init__(self, answering: Answering, publishing: Publishing, settings: EvaluationSettings, suite: Suite | None) -> None:
        self.suite = suite
        self._answering = answering
        self._publishing = publishing
        self._settings = settings
        self._lock = asyncio.Lock()

    async def evaluate(self, scenario: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """`{release_id, against?, suite?}` -> the report: score, interval, rows, and the paired difference to `against`."""
        suite = await self._chosen(body.get("suite"))
        named = [body.get("against"), body.get("release_id") or body.get("candidate")]
        async with self._lock:
            releases: list[Release | None] = []
            for release_id in dict.fromkeys(name for name in named if name):
                releases.append(await self._publishing.resolve(scenario, ReleaseId(str(release_id)), None))
            report = await run_suite(
                self._answering,
                suite,
                releases,
                max_new_tokens=self._settings.max_new_tokens,
                temperature=self._settings.temperature,
                alpha=self._settings.alpha,
                concurrency=self._settings.concurrency,
            )
        judged = report.summaries[-1]
        return {
            "scenario": scenario,
            "release_id": releases[-1].release_id if releases[-1] else None,
            "suite": report.suite,
            "split": report.split,
            "items": judged.items,
            "missing": judged.missing,
            "score": judged.mean,
            "interval": judged.interval,
            "differences": [asdict(difference) for difference in report.differences],
            "rows": [asdict(row) for row in report.rows],
        }

    async def _chosen(self, source: Any) -> Suite:
        if source is not None:
            suite = await asyncio.to_thread(Suite.load, str(source))
        elif self.suite is not None:
            suite = self.suite
        else:
            raise SuiteNotFound("No suite is configured.", hint="Name one with --suite, or set evaluation.suite in serve.yaml.")
        return suite.select(self._settings.split, self._settings.limit)

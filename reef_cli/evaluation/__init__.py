"""Evaluation: suites, graders, the decision statistics, and the gate every candidate passes.

Owns verdicts and their evidence; does not know how releases are stored, published or served.
"""

from reef_cli.evaluation.asking import Asker
from reef_cli.evaluation.decide import Conclusion, decide, decide_return, interval
from reef_cli.evaluation.gate import Gate
from reef_cli.evaluation.run import Report, run_suite
from reef_cli.evaluation.suite import Item, Suite

__all__ = ["Asker", "Conclusion", "Gate", "Item", "Report", "Suite", "decide", "decide_return", "interval", "run_suite"]

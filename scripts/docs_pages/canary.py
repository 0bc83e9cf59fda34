"""The table of a canary's error rates and power, from its simulation's result file."""

import json
from pathlib import Path

from docs_pages.markdown import table as markdown


def table(file: Path) -> str:
    """Binary rewards: rates of promotion and of being taken back, and the median sessions of the runs that ended."""
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = [
        (
            f"{100 * row['share']:.0f} %",
            f"{row['current']:.2f}",
            f"{row['canary']:.2f}",
            f"{100 * row['promoted']:.1f} %",
            f"{100 * row['returned']:.1f} %",
            str(row["median_sessions"] or ""),
        )
        for row in result["rows"]
        if row["rewards"] == "binary" and not row["swing"]
    ]
    return markdown(("share", "head's mean", "canary's mean", "promoted", "taken back", "median sessions"), rows)

"""Artifacts and release chains under version control: one bare git repository with a Git LFS object store.

Owns bytes, refs and history; does not know who decided, what serves, or how an artifact came about.
"""

from reef_cli.releases.collect import GcReport, Keep
from reef_cli.releases.diff import FileDiff, ReleaseDiff
from reef_cli.releases.service import ReleaseService
from reef_cli.releases.verify import Problem

__all__ = ["FileDiff", "GcReport", "Keep", "Problem", "ReleaseDiff", "ReleaseService"]

"""Where figures were measured."""

from collections.abc import Iterable, Mapping


def where(machines: Iterable[Mapping[str, str]]) -> str:
    """The machines and commits of several runs: `2 shared cores (AMD EPYC; Intel Xeon), commits ...`."""
    runs = list(machines)
    cores = sorted({f"{run['cores']} shared cores" for run in runs})
    cpus = sorted({run["cpu"] for run in runs})
    commits = sorted({run["commit"] for run in runs})
    return f"{' or '.join(cores)} ({'; '.join(cpus)}), commits {', '.join(commits)}"

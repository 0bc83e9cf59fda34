"""The table of Prometheus metrics, from the catalogue itself."""

from docs_pages.markdown import code
from docs_pages.markdown import table as markdown
from reef_cli.telemetry.metrics import Metrics


def table() -> str:
    """Name, kind, labels, meaning."""
    rows = [(code(m.name), m.kind, ", ".join(map(code, m.labels)), m.help) for m in Metrics().families()]
    return markdown(("metric", "kind", "labels", "meaning"), rows)

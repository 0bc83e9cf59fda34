"""OpenTelemetry spans when the `otel` extra is there and tracing is on; otherwise every call costs next to nothing.

Spans carry ids, sizes and times, never bodies. The exporter and its endpoint are configured by OpenTelemetry's own environment
variables. Knows nothing of what is traced.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, Protocol

from reef_cli.core.errors import MissingDependency

_NOTHING = nullcontext()


class Tracer(Protocol):
    """Opens spans. `parent` are the request's headers, for a trace begun elsewhere (`traceparent`)."""

    def span(self, name: str, parent: Mapping[str, str] | None = None, **attributes: Any) -> AbstractContextManager[Any]: ...


class NoTracer:
    """Tracing is off."""

    def span(self, *_: Any, **__: Any) -> AbstractContextManager[Any]:
        return _NOTHING


class OtelTracer:
    """Tracing through the OpenTelemetry API; the caller has set up a provider."""

    def __init__(self, tracer: Any, extract: Any) -> None:
        self._tracer = tracer
        self._extract = extract

    @contextmanager
    def span(self, name: str, parent: Mapping[str, str] | None = None, **attributes: Any) -> Iterator[Any]:
        context = self._extract(dict(parent)) if parent is not None else None
        with self._tracer.start_as_current_span(name, context=context, attributes=attributes) as span:
            yield span


def open_tracer(enabled: bool, service: str = "reef") -> Tracer:
    """A tracer for the settings; `MissingDependency` when tracing is on but OpenTelemetry's SDK is not installed."""
    if not enabled:
        return NoTracer()
    try:
        trace = import_module("opentelemetry.trace")
        propagate = import_module("opentelemetry.propagate")
        sdk = import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resources = import_module("opentelemetry.sdk.resources")
    except ImportError as error:
        raise MissingDependency("tracing needs OpenTelemetry", hint="pip install 'reef-cli[otel]'") from error
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": service}))
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return OtelTracer(trace.get_tracer(service), propagate.extract)

"""OpenTelemetry spans when the `otel` extra is there and tracing is on; otherwise every call costs next to nothing.

Spans carry ids, sizes and times, never bodies. The exporter and its endpoint are configured by OpenTelemetry's own environment
variables. Knows nothing of what is traced.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any, Protocol

from reef_cli.core.errors import MissingDependency

Attributes = Mapping[str, Any]
"""Those that are None are left out."""

_NOTHING = nullcontext()


class Span(Protocol):
    """A span under way."""

    def describe(self, name: str, attributes: Attributes, *, failed: bool = False) -> None:
        """Its name and facts, once they are known."""
        ...


class Tracer(Protocol):
    """Opens spans. `on` says whether anybody listens, so that facts are not gathered for nobody."""

    on: bool

    def span(self, parent: Mapping[str, str]) -> AbstractContextManager[Span | None]:
        """A server's span around a request; `parent` are its headers, for a trace begun elsewhere (`traceparent`)."""
        ...

    def finished(self, name: str, seconds: float, attributes: Attributes, *, error: str | None = None) -> None:
        """A call to somebody else that ended just now, within the span that is open."""
        ...

    def event(self, name: str, attributes: Attributes) -> None:
        """Something that happened, on the span that is open."""
        ...


class NoTracer:
    """Tracing is off."""

    on = False

    def span(self, parent: Mapping[str, str]) -> AbstractContextManager[None]:
        del parent
        return _NOTHING

    def finished(self, *_: Any, **__: Any) -> None:
        """Nobody listens."""

    def event(self, *_: Any, **__: Any) -> None:
        """Nobody listens."""


class OtelTracer:
    """Tracing through the OpenTelemetry API; the caller has set up a provider."""

    on = True

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._api = import_module("opentelemetry.trace")
        self._extract = import_module("opentelemetry.propagate").extract

    @contextmanager
    def span(self, parent: Mapping[str, str]) -> Iterator[Span]:
        context = self._extract({name.lower(): value for name, value in parent.items()})
        kind = self._api.SpanKind.SERVER
        with self._tracer.start_as_current_span("request", context=context, kind=kind) as span:
            yield _OtelSpan(span, self._api)

    def finished(self, name: str, seconds: float, attributes: Attributes, *, error: str | None = None) -> None:
        ended = time.time_ns()
        # The request's own clock began a moment before its span did; a child never begins before its parent.
        began = max(ended - int(seconds * 1e9), getattr(self._api.get_current_span(), "start_time", None) or 0)
        span = self._tracer.start_span(name, kind=self._api.SpanKind.CLIENT, attributes=known(attributes), start_time=began)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(self._api.StatusCode.ERROR)
        span.end(ended)

    def event(self, name: str, attributes: Attributes) -> None:
        self._api.get_current_span().add_event(name, known(attributes))


class _OtelSpan:
    def __init__(self, span: Any, api: Any) -> None:
        self._span = span
        self._api = api

    def describe(self, name: str, attributes: Attributes, *, failed: bool = False) -> None:
        self._span.update_name(name)
        self._span.set_attributes(known(attributes))
        if failed:
            self._span.set_status(self._api.StatusCode.ERROR)


def known(attributes: Attributes) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def open_tracer(enabled: bool, service: str = "reef") -> Tracer:
    """A tracer for the settings; `MissingDependency` when tracing is on but OpenTelemetry's SDK is not installed."""
    if not enabled:
        return NoTracer()
    try:
        sdk = import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resources = import_module("opentelemetry.sdk.resources")
    except ImportError as error:
        raise MissingDependency("tracing needs OpenTelemetry", hint="pip install 'reef-cli[otel]'") from error
    # A provider of its own: what else runs in the process keeps its own tracing, and a second server starts afresh.
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": service}))
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    return OtelTracer(provider.get_tracer(service))

"""Writes an OpenTelemetry span for each call (`--traces`). It needs the extra `otel`, and is imported only if it is used.

The names are those of the semantic conventions for generative AI (semantic-conventions 1.37 and later, `gen_ai.*`; `error.type`), and
`tokencache.*` for what only this proxy knows. A span begins and ends with its call, and is made when the call has ended. Its parent is the
span that the client names (`traceparent`, W3C Trace Context). Like the log, it contains no text of a harness, a model or an engine's error.

A duplicate that gets the reply of another call (`dedup`) has a span without tokens, because it samples nothing.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tokencache import __version__
from tokencache.core.incidents import IncidentKind
from tokencache.core.turn import TurnMark
from tokencache.proxy.facts import BegunCall, CallFacts
from tokencache.proxy.recorder import Recorded

_PROPAGATOR = TraceContextTextMapPropagator()
_FAILURES = frozenset(
    {TurnMark.ABORTED, TurnMark.ENGINE_ABORTED, TurnMark.UPSTREAM_BROKE, TurnMark.ENGINE_ERROR, TurnMark.INTERNAL_ERROR, "error"}
)
_ANSWERED = frozenset({IncidentKind.RETRY_JOINED, IncidentKind.RETRY_REPLAYED, IncidentKind.BUDGET_SPENT})


class CallSpans:
    """Writes spans. They are exported in the background, as the variables `OTEL_*` say."""

    def __init__(self) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "tokencache"}
        self._provider = TracerProvider(resource=Resource.create(named))
        self._provider.add_span_processor(BatchSpanProcessor(trace_exporter.OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("tokencache", __version__)

    async def close(self) -> None:
        """Export what is left."""
        await asyncio.to_thread(self._provider.shutdown)

    def answered(self, facts: CallFacts, recorded: Recorded, headers: Mapping[str, str]) -> None:
        """Write the span of a call that an engine answered; `headers` are the client's."""
        turns = [entry.turn for entry in recorded.entries]
        ended = facts.mark or ("error" if facts.reply.error else "")
        failure = ended if ended in _FAILURES else next((one.kind for one in recorded.incidents if one.hole), "")
        found: dict[str, Any] = {"tokencache.outcome": ended or "answered"}
        if turns:
            found |= {
                "gen_ai.response.model": turns[0].model,
                "gen_ai.response.finish_reasons": [turn.finish_reason or "" for turn in turns],
                "gen_ai.usage.input_tokens": turns[0].prompt_tokens,
                "gen_ai.usage.output_tokens": sum(turn.completion_tokens for turn in turns),
                "tokencache.turn": turns[0].id,
                "tokencache.match": turns[0].match,
                "tokencache.reason": turns[0].reason,
            }
        self._write(facts.call, headers, found, failure, facts.ended)

    def ended(self, call: BegunCall, headers: Mapping[str, str], how: str, status: int) -> None:
        """Write the span of a call that ended without a turn. `how` and `status` as in `CallAttempt.report`."""
        found: dict[str, Any] = {"tokencache.outcome": f"{how}", "http.response.status_code": status or ""}
        self._write(call, headers, found, "" if how in _ANSWERED else how, time.monotonic() + call.offset)

    def _write(self, call: BegunCall, headers: Mapping[str, str], found: dict[str, Any], failure: str, ended: float) -> None:
        span = self._tracer.start_span(
            f"chat {call.chat.model}",
            context=_PROPAGATOR.extract(headers),
            kind=SpanKind.CLIENT,
            start_time=_nanoseconds(call.started),
            attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "vllm",
                "gen_ai.request.model": call.chat.model,
                "gen_ai.conversation.id": call.session,
                "tokencache.call": call.id,
                "tokencache.dialect": call.chat.dialect,
                **{name: value for name, value in found.items() if value != ""},
            },
        )
        if failure:
            span.set_attribute("error.type", str(failure))
            span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(ended))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)

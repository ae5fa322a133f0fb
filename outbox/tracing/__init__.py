"""Traces by OpenTelemetry: a message's way from `enqueue` over the relay to its handler.

Nothing of OpenTelemetry is imported here: it is used where the application, or `opentelemetry-instrument`, has loaded it and has
set up a tracer provider. Where not, there are no spans, and nothing is done for a message. Only the API is used, and whatever it
raises is logged once and goes no further: a trace never decides about a message.

The shape is that of the semantic conventions for messaging. `enqueue` makes a `create` span, whose context is stored with the
row and travels unchanged, unless the event has a `traceparent` of its own. The relay makes `send` spans, linked to the contexts
in the batch; a consumer makes a `process` span, linked to the one of its message, which is current while the handler runs.
"""

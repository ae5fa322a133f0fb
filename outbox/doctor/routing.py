"""Checks of RabbitMQ by its management plugin: whether each topic gets into a queue, and whether what is there stays there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.doctor.findings import info, problem, some, warning
from outbox.topics import matches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.doctor.findings import Finding
    from outbox.doctor.management import Management
    from outbox.doctor.scope import Broker
    from outbox.routes import Route

DEFAULT_DELIVERY_LIMIT = 20
"""From RabbitMQ 4.0 on, for quorum queues that set none: https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling"""

FEW_RETURNS = 1000
_FIRST_WITH_LIMIT = (4,)


def alarms(broker: Broker) -> Iterator[Finding]:
    """The broker takes messages."""
    for alarm in _management(broker).alarms():
        yield problem(
            f"the broker has an alarm: {alarm}",
            "it takes no messages; relays wait, and no attempt is spent",
            "free memory or disk, or let consumers drain the queues; rabbitmqctl list_alarms",
        )


def bindings(broker: Broker) -> Iterator[Finding]:
    """Each topic that was seen, or that a route names, gets into a queue."""
    lost: dict[str, list[str]] = {}
    for topic, type_ in _topics(broker):
        route = broker.scope.routes.of(topic)
        if "{key}" not in route.routing_key and not _routed(_management(broker), route, topic, type_):
            lost.setdefault(route.exchange, []).append(topic)
    for exchange, topics in lost.items():
        yield problem(
            f"no queue is bound to exchange {exchange or '(default)'} for: {some(dict.fromkeys(topics))}",
            "these messages come back, spend their attempts, and die",
            'start the consumer that binds its queue, or name the queue in the route (queues = ["..."]); then outbox-relay dead retry',
        )


def queue_limits(broker: Broker) -> Iterator[Finding]:
    """No queue that our messages get into drops any of them."""
    management = _management(broker)
    for name in sorted(_reached(broker)):
        if queue := management.queues.get(name):
            yield from _of_queue(management, name, queue)


def _of_queue(management: Management, name: str, queue: dict[str, Any]) -> Iterator[Finding]:
    rules = _Rules(queue.get("arguments") or {}, management.policy_of(queue))
    if not queue.get("durable", True) or queue.get("exclusive") or queue.get("auto_delete"):
        kind = "exclusive" if queue.get("exclusive") else "auto-delete" if queue.get("auto_delete") else "not durable"
        yield problem(
            f"queue {name} is {kind}",
            "it is gone, with its messages, when the broker restarts or its consumer leaves",
            "a durable queue: delete it while it is empty, and let outbox-consume or the relay declare it",
        )
    elif queue.get("type") == "classic":
        yield info(f"queue {name} is a classic queue, on one node of the broker; a quorum queue is on several")
    target = _dead_letter_target(management, rules)
    if longest := rules.first("max-length", "max-length-bytes"):
        yield from _of_length(name, longest, rules)
    for rule in ("message-ttl", "expires"):
        value = rules.get(rule)
        if value is not None:
            kept = rule == "message-ttl" and target is None and rules.get("dead-letter-exchange") is not None
            yield (warning if kept else problem)(
                f"queue {name} has {rule} = {value} ms",
                "messages are taken out of it unhandled"
                + (", and dead-lettered, without confirms" if kept else ", and are gone"),
                "take it away; failed messages wait in failed_messages, where nothing expires",
            )
    limit = _delivery_limit(management, queue, rules)
    if limit is not None and limit < FEW_RETURNS and rules.get("dead-letter-exchange") is None:
        yield problem(
            f"queue {name} drops a message after {limit} returns, and has no dead-letter exchange",
            "a consumer that crashes or stops so often with a message in hand loses it, and its neighbours",
            f"rabbitmqctl set_policy NAME '^{name}$' '{{\"delivery-limit\": 2000000000}}' --apply-to queues, or a dead-letter-exchange",
        )
    if target is not None:
        yield target


def _of_length(name: str, limit: tuple[str, Any], rules: _Rules) -> Iterator[Finding]:
    overflow = rules.get("overflow") or "drop-head"
    if overflow.startswith("reject-publish"):
        yield info(f"queue {name} has {limit[0]} = {limit[1]} and refuses what is more; the relay tries again")
    else:
        yield problem(
            f"queue {name} has {limit[0]} = {limit[1]}, and drops the oldest messages when it is full ({overflow})",
            "messages that the broker has confirmed are lost",
            "overflow = reject-publish: the relay then keeps them, and tries again",
        )


def _dead_letter_target(management: Management, rules: _Rules) -> Finding | None:
    """Return what is wrong with where a queue's dropped messages go; None if nothing is, or they go nowhere."""
    exchange = rules.get("dead-letter-exchange")
    key = rules.get("dead-letter-routing-key")
    if exchange is None:
        return None
    if exchange == "":
        there = key is None or key in management.queues
    else:
        there = any(each["source"] == exchange for each in management.bindings)
    if exchange in management.exchanges and there:
        return None
    return problem(
        f"dead-letter exchange {exchange or '(default)'} is not there, or no queue is bound to it",
        "what is dead-lettered is gone",
        "declare it, with a queue that is bound to it",
    )


def _delivery_limit(management: Management, queue: dict[str, Any], rules: _Rules) -> int | None:
    if queue.get("type") != "quorum":
        return None
    found = rules.get("delivery-limit")
    if found is None and management.version >= _FIRST_WITH_LIMIT:
        return DEFAULT_DELIVERY_LIMIT
    return None if found is None or found < 0 else int(found)


class _Rules:
    """What arguments and policies make of a queue; of two limits the lower holds."""

    def __init__(self, arguments: dict[str, Any], policy: dict[str, Any]) -> None:
        self._arguments = {name.removeprefix("x-"): value for name, value in arguments.items()}
        self._policy = policy

    def get(self, name: str) -> Any:
        values = [each[name] for each in (self._arguments, self._policy) if name in each]
        if len(values) > 1 and all(isinstance(value, int) for value in values):
            return min(values)
        return values[0] if values else None

    def first(self, *names: str) -> tuple[str, Any] | None:
        return next(((name, self.get(name)) for name in names if self.get(name) is not None), None)


def _topics(broker: Broker) -> list[tuple[str, str]]:
    """Return the topics that were seen, with their types, and those that routes and their queues are made for."""
    named = (route.topics for route in broker.scope.routes.all if not {"*", "#"} & set(route.topics.split(".")))
    return sorted({*broker.topics, *((topic, topic) for topic in named)})


def _routed(management: Management, route: Route, topic: str, type_: str) -> bool:
    key = route.routing_key.format(topic=topic, key="", type=type_)
    if not route.exchange:
        return key in management.queues
    exchange = management.exchanges.get(route.exchange)
    if exchange is None:
        return True  # said by another check
    if "alternate-exchange" in {**exchange.get("arguments", {}), **management.policy_of(exchange)}:
        return True
    return any(
        _takes(exchange["type"], each["routing_key"], key) for each in management.bindings if each["source"] == route.exchange
    )


def _takes(exchange_type: str, binding_key: str, key: str) -> bool:
    if exchange_type == "direct":
        return binding_key == key
    # What other kinds of exchanges do with a message is not for us to know.
    return exchange_type != "topic" or matches(binding_key, key)


def _reached(broker: Broker) -> set[str]:
    """Return the queues that our messages may get into, by any of the routes."""
    management, found = _management(broker), set[str]()
    for route in broker.scope.routes.all:
        found |= set(route.queues)
        if not route.exchange and "{" not in route.routing_key:
            found.add(route.routing_key)
        sources, seen = [route.exchange] if route.exchange else [], set[str]()
        while sources:
            source = sources.pop()
            seen.add(source)
            for each in management.bindings:
                if each["source"] == source and each["destination_type"] == "queue":
                    found.add(each["destination"])
                elif each["source"] == source and each["destination"] not in seen:
                    sources.append(each["destination"])
    return found


def _management(broker: Broker) -> Management:
    if broker.management is None:
        raise LookupError("the check is only made with a management URL")
    return broker.management

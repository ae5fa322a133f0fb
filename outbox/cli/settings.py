"""The relay's settings out of what its command was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.backoff import Backoff
from outbox.broker import tls
from outbox.cli import config
from outbox.settings import RelaySettings
from outbox.states import OnDead, RetryPolicy
from outbox.wire import Format

if TYPE_CHECKING:
    from collections.abc import Mapping

    import click


def settings_of(ctx: click.Context) -> RelaySettings:
    """Return the settings that the options of `outbox-relay run` make. Raises `ConfigurationError` if they cannot work."""
    given = ctx.params
    return RelaySettings(
        database_url=given["database_url"],
        broker_url=broker_url_of(given),
        schema=given["schema"],
        routes=config.routes_of(ctx, form=Format(given["format"]), source=given["source"]),
        lease_s=given["lease"],
        confirm_timeout_s=given["confirm_timeout"],
        poll_interval_s=given["poll_interval"],
        wake=given["wake"],
        wake_database_url=given["wake_database_url"],
        batch_size=given["batch_size"],
        grace_s=given["grace"],
        policies=config.policies_of(ctx, policy_of(given)),
        retention_s=given["retention"],
        inbox_retention_s=given["inbox_retention"],
        allow_unconfirmed=given["allow_unconfirmed"],
    )


def policy_of(given: Mapping[str, Any]) -> RetryPolicy:
    """Return the policy of topics that have none of their own."""
    return RetryPolicy(
        max_attempts=given["max_attempts"],
        backoff=Backoff(first_s=given["retry_first"], ceiling_s=given["retry_ceiling"]),
        max_age_s=given["max_age"],
        on_dead=OnDead(given["on_dead"]),
    )


def broker_url_of(given: Mapping[str, Any]) -> str:
    """Return the broker's URL with the files for TLS. Raises `ConfigurationError` where they are of no use."""
    return tls.with_files(given["broker_url"], ca=given["broker_ca"], cert=given["broker_cert"], key=given["broker_key"])

#!/usr/bin/env bash
# Installs the servers that the tests start, where they are missing; does nothing when running ones are named.
set -euo pipefail

missing=()
if [ -z "${OUTBOX_TEST_POSTGRES_URL:-}" ]; then
    command -v pgbouncer >/dev/null || [ -x /usr/sbin/pgbouncer ] || missing+=(pgbouncer)
    compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || command -v initdb >/dev/null || missing+=(postgresql)
fi
if [ -z "${OUTBOX_TEST_RABBITMQ_URL:-}" ]; then
    [ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] || command -v rabbitmq-server >/dev/null || missing+=(rabbitmq-server)
fi
if [ -z "${OUTBOX_TEST_REDIS_URL:-}" ]; then
    command -v redis-server >/dev/null || missing+=(redis-server)
fi
command -v openssl >/dev/null || missing+=(openssl)
# Without it some tests are skipped, so nobody is asked to install it.
command -v promtool >/dev/null || [ "$(id -u)" != 0 ] || missing+=(prometheus)
[ ${#missing[@]} -gt 0 ] || exit 0

export APT_INSTALL_HINT="name running servers in OUTBOX_TEST_POSTGRES_URL, OUTBOX_TEST_RABBITMQ_URL and OUTBOX_TEST_REDIS_URL"
"$(dirname "$0")/../../.ci/apt-install" "${missing[@]}"

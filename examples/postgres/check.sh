#!/usr/bin/env bash
# Runs the example on a PostgreSQL of its own, in a temporary folder.
set -euo pipefail
cd "$(dirname "$0")"
export PATH="$PATH:$(ls -d /usr/lib/postgresql/*/bin | tail -1)"
as() { (cd /; if [ "$(id -u)" = 0 ]; then exec runuser -u postgres -- env PATH="$PATH" "$@"; else exec "$@"; fi); }
dir=$(as mktemp -d)
trap 'as pg_ctl -D "$dir/data" -m fast -s stop || true; rm -rf "$dir" "$bin"' EXIT
bin=$(mktemp -d)
as initdb -D "$dir/data" -U shop --auth=trust >/dev/null
port=$((20000 + RANDOM % 20000))
as pg_ctl -D "$dir/data" -l "$dir/log" -w -s -o "-p $port -c listen_addresses=127.0.0.1 -c unix_socket_directories=" start
go build -o "$bin/postgres" .
export DATABASE_URL="postgres://shop@127.0.0.1:$port/postgres"
"$bin/postgres" apples=3 pears=2 >"$bin/out" 2>&1 & example=$!
for _ in $(seq 300); do
  [ "$(grep -c shipped "$bin/out")" -ge 2 ] && break
  sleep 0.1
done
kill -INT "$example"; wait "$example" || { cat "$bin/out"; exit 1; }
sort "$bin/out"
diff <(sort "$bin/out") <(printf 'shipped apples 3\nshipped pears 2\n')
echo "the example on PostgreSQL works"

#!/usr/bin/env bash
# Measures the durable buses beside what else keeps work in JetStream, Redis or PostgreSQL. PEERS is a directory with a run.sh that
# prints the peers' table and takes -n and -runs; without it only the engine is measured. Each round is one run of everything.
set -euo pipefail
rounds=${ROUNDS:-3} events=${EVENTS:-30000} peers=${PEERS:-} workers=16
dir=$(mktemp -d)
port=$((20000 + RANDOM % 20000))
redis-server --bind 127.0.0.1 --port "$port" --dir "$dir" --save "" --appendonly yes --appendfsync everysec >"$dir/redis.log" & redis=$!
trap 'kill "$redis"; wait "$redis" || true; rm -rf "$dir"' EXIT
for round in $(seq "$rounds"); do
  echo "round $round of $rounds" >&2
  for bus in nats redis; do
    for workload in distinct drain; do
      bin/engine bench --bus "$bus" --redis "127.0.0.1:$port" --workload "$workload" --events "$events" --workers "$workers" -o json |
        sed -E 's/.*"workload":"([a-z]+)".*"bus":"([a-z]+)".*"reconciles_per_s":([0-9.e+]+).*/windlass-\2 \1 \3/' >>"$dir/ours"
    done
  done
  if [ -x "$peers/run.sh" ]; then
    (cd "$peers" && ./run.sh -n "$events" -runs 1) | tee -a "$dir/peers" >&2
  fi
done
sort -k1,1 -k2,2 -k3,3n "$dir/ours" | awk '
  { key = $1 " " ($2 == "drain" ? "drained" : "live"); n[key]++; v[key, n[key]] = $3 }
  END { for (key in n) printf "%-16s %-8s %8.0f /s, median of %d\n", substr(key, 1, index(key, " ") - 1), substr(key, index(key, " ") + 1), v[key, int((n[key] + 1) / 2)], n[key] | "sort" }'

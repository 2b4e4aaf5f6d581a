#!/usr/bin/env bash
# Alternates the engine with its peers and prints the medians and their ratios. PEERS is a directory with a program that
# prints lines "peer workload events … events/s … reconciles/s" (controller-runtime among them); without it, only the
# engine is measured. ROUNDS and EVENTS as named.
set -euo pipefail
rounds=${ROUNDS:-3} events=${EVENTS:-300000} peers=${PEERS:-}
log=$(mktemp) bin=$(mktemp -d)
trap 'rm -rf "$log" "$bin"' EXIT

if [ -n "$peers" ] && [ -d "$peers" ]; then
  (cd "$peers" && go build -o "$bin/peers" .)
else
  echo "no peers found (PEERS=$peers): measuring the engine alone" >&2
fi
for round in $(seq "$rounds"); do
  echo "round $round of $rounds" >&2
  for workload in distinct coalesce; do
    for path in native wire; do
      bin/engine bench --workload "$workload" --path "$path" --events "$events" -o json |
        sed -E 's/.*"workload":"([a-z]+)","path":"([a-z]+)".*"events_per_s":([0-9.e+]+).*"allocs_per_event":([0-9.e+]+),.*"bytes.*/windlass-\2 \1 \3 \4/' >>"$log"
    done
  done
  if [ -x "$bin/peers" ]; then
    for peer in controller-runtime client-go/workqueue; do
      "$bin/peers" -n "$events" -rounds 1 -peer "$peer" |
        awk '{ for (i = 1; i <= NF; i++) { if ($i == "events/s") e = $(i-1); if ($i == "allocs/event") a = $(i-1) } print $1, $2, e, a }' >>"$log"
    done
  fi
done

sort -k1,1 -k2,2 -k3,3n "$log" | awk '
  { key = $1 " " $2; n[key]++; v[key, n[key]] = $3; a[key, n[key]] = $4 }
  END {
    printf "%-22s %-9s %14s %13s %10s %10s\n", "", "workload", "events/s", "allocs/event", "native is", "wire is"
    for (key in n) { m[key] = v[key, int((n[key] + 1) / 2)]; al[key] = a[key, int((n[key] + 1) / 2)] }
    for (key in n) {
      split(key, p, " ")
      printf "%-22s %-9s %14.0f %13.1f %9.2fx %9.2fx\n", p[1], p[2], m[key], al[key],
        m["windlass-native " p[2]] / m[key], m["windlass-wire " p[2]] / m[key] | "sort -k2,2 -k1,1"
    }
  }'

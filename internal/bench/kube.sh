#!/usr/bin/env bash
# Alternates the engine with a controller-runtime manager on one API server, and prints the medians. PEERS is a directory with
# a program cmd/kube that seeds and measures; without it, nothing can be compared. ROUNDS, OBJECTS and UPDATES as named.
set -euo pipefail
rounds=${ROUNDS:-3} objects=${OBJECTS:-10000} updates=${UPDATES:-2000} peers=${PEERS:?a directory with the program cmd/kube of the peers}
log=$(mktemp) bin=$(mktemp -d)
trap 'rm -rf "$log" "$bin"' EXIT
export KUBECONFIG=$WINDLASS_KUBECONFIG

(cd "$peers" && go build -o "$bin/peer" ./cmd/kube)
go build -o "$bin/windlass" ./internal/bench/kube
echo "making $objects ConfigMaps of 2 KiB" >&2
"$bin/peer" -seed "$objects"
measure() { # name command…
  local name=$1
  shift
  "$@" | awk -v name="$name" '
    function ms(d) { if (d ~ /µs$/) return d / 1000; if (d ~ /ms$/) return d + 0; return d * 1000 }
    /^cold/ { sub(/s,$/, "", $5); cold = $5; heap = $7 }
    /^updates/ { for (i = 1; i <= NF; i++) { if ($i == "p50") p50 = ms($(i+1)); if ($i == "p99") p99 = ms($(i+1)) } print name, cold, heap, p50, p99 }' >>"$log"
}
for round in $(seq "$rounds"); do
  echo "round $round of $rounds" >&2
  measure controller-runtime/metadata "$bin/peer" -updates "$updates" -expect "$objects" -metadata
  measure windlass/metadata "$bin/windlass" -updates "$updates" -expect "$objects" -cache metadata
  measure controller-runtime/full "$bin/peer" -updates "$updates" -expect "$objects"
  measure windlass/full "$bin/windlass" -updates "$updates" -expect "$objects" -cache full
  measure windlass/fields "$bin/windlass" -updates "$updates" -expect "$objects" -cache fields
  measure windlass/metadata/jetstream "$bin/windlass" -updates "$updates" -expect "$objects" -cache metadata -bus nats
done
awk '
  function median(name, column,   i, j, t, m, v) {
    m = n[name]
    for (i = 1; i <= m; i++) v[i] = value[name, column, i]
    for (i = 1; i <= m; i++) for (j = i + 1; j <= m; j++) if (v[j] < v[i]) { t = v[i]; v[i] = v[j]; v[j] = t }
    return v[int((m + 1) / 2)]
  }
  { if (!($1 in n)) order[++names] = $1; n[$1]++; for (c = 2; c <= 5; c++) value[$1, c, n[$1]] = $c }
  END {
    printf "%-28s %12s %10s %12s %12s   %s\n", "", "cold start", "heap MiB", "age p50 ms", "age p99 ms", "ratios to controller-runtime"
    for (i = 1; i <= names; i++) {
      name = order[i]; split(name, part, "/")
      printf "%-28s %10.2f s %10.1f %12.2f %12.2f", name, median(name, 2), median(name, 3), median(name, 4), median(name, 5)
      if (part[1] == "windlass") {
        peer = "controller-runtime/" (part[2] == "metadata" ? "metadata" : "full")
        printf "   %.2f %.2f %.2f %.2f", median(name, 2) / median(peer, 2), median(name, 3) / median(peer, 3), median(name, 4) / median(peer, 4), median(name, 5) / median(peer, 5)
      }
      print ""
    }
  }' "$log"

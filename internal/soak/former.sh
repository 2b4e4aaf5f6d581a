#!/usr/bin/env bash
# Builds soak as it was at a commit, and prints where it is: former.sh COMMIT
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=$(git rev-parse --verify --quiet "$1^{commit}") || {
  echo "former.sh: this clone has no commit $1: fetch the history that has it (git fetch --unshallow)" >&2
  exit 1
}
binary=$PWD/.cache/soak-$commit
if [ ! -x "$binary" ]; then
  source=$(mktemp -d)
  trap 'rm -rf "$source"' EXIT
  git archive "$commit" | tar -x -C "$source"
  mkdir -p .cache
  (cd "$source" && go build -o "$binary" ./internal/soak)
fi
echo "$binary"

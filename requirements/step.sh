#!/usr/bin/env bash
# step.sh LOG TITLE COMMAND...: runs one step of the set-up quietly, says what it is and how long it took.
# The command's own words go to LOG; if it fails, the last of them are shown.
set -euo pipefail

log=$1 title=$2
shift 2
mkdir -p "$(dirname "$log")"
echo "$title ..."
begin=$SECONDS
printf '\n== %s\n%s\n' "$title" "$*" >>"$log"
if "$@" >>"$log" 2>&1; then
    echo "    done in $((SECONDS - begin)) s"
else
    code=$?
    tail -n 15 "$log" | sed 's/^/    /' >&2
    echo "    failed after $((SECONDS - begin)) s: the whole log is $log; the same make command goes on from here" >&2
    exit "$code"
fi

#!/usr/bin/env bash
# One run on a rented machine with GPUs, from this checkout: install, check, train, and fetch what it leaves.
#
#     scripts/rented.sh root@HOST run best_record --data fineweb-caseops8192 --gpus 8 --out runs/rented
#
# What is behind the host is for `caddie`, and --out names the folder to fetch. FETCH is a `caddie data` command that
# makes the text there first, as in: FETCH='--fineweb caseops8192 --shards 80 --out fineweb-caseops8192'. Give the same command
# again to go on after a lost connection: what is installed, fetched and trained stays. PORT is that of ssh.
set -euo pipefail
cd "$(dirname "$0")/.."

host=${1:?name the machine, as in root@HOST}
shift
out=
for word in "$@"; do
    [[ ${before:-} == --out ]] && out=$word
    before=$word
done
: "${out:?name the folder to fetch with --out}"

ssh=(ssh -p "${PORT:-22}" -o ServerAliveInterval=30)
there=caddie-run

remote() { # runs one line in the folder on that machine
    "${ssh[@]}" "$host" "cd $there && $1"
}

"${ssh[@]}" "$host" "mkdir -p $there"
git archive HEAD | "${ssh[@]}" "$host" "tar -x -C $there"
remote "test -x .venv/bin/caddie || { python3 -m venv .venv && .venv/bin/pip install --quiet '.[hub]'; }"
if [[ -n ${FETCH:-} ]]; then
    remote ".venv/bin/caddie data $FETCH"
fi

# The run goes on by itself when the connection is lost; its output is in a file, which is shown meanwhile. One that has
# ended well is only fetched.
job=$(printf '%s' "$out" | tr -c '[:alnum:]' _)
printf '%q ' .venv/bin/caddie "$@" | remote "cat >$job.sh"
remote "kill -0 \$(cat $job.pid 2>/dev/null) 2>/dev/null || test \"\$(cat $job.status 2>/dev/null)\" = 0 || {
    rm -f $job.status
    nohup sh -c 'bash $job.sh; echo \$? >$job.status' >$job.txt 2>&1 </dev/null &
    echo \$! >$job.pid
}"
status=0
remote "tail -n +1 -f --pid=\$(cat $job.pid) $job.txt; exit \$(cat $job.status)" || status=$?

mkdir -p "$out"
remote "tar -c -C $(printf '%q' "$out") ." | tar -x -C "$out"
echo "fetched $out; the machine is still there, and costs until you end it"
exit "$status"

#!/usr/bin/env bash
#SBATCH --job-name=gpt2lab
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# A template: a run that goes on over as many jobs as it needs.
#   sbatch scripts/slurm.sh --run_name gpt2-124m --model gpt2
# The trainer reads SLURM_JOB_END_TIME and stops with a saved step before it. Should that not be set, the batch script
# is told 120 s before the end (--signal, above), and passes it on. Either way the job puts itself back into the queue
# until status.json says `completed`, or that the run was stopped for good (a STOP file, --stop_at, --stop_after_steps,
# early stopping), or five starts in a row ended without a new checkpoint (MAX_CRASHES).
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-$PWD}" || exit

NPROC=${NPROC:-${SLURM_GPUS_ON_NODE:-1}}
TORCHRUN=${TORCHRUN:-.venv/bin/torchrun}
MAX_CRASHES=${MAX_CRASHES:-5}
GRACE=110  # seconds between asking the workers to stop and killing them; torchrun's own is 30

for word in "$@"; do
    case "$word" in --resume | --resume=*) echo "error: leave --resume out, it is added here" >&2; exit 2 ;; esac
done
if ((${SLURM_NNODES:-1} > 1)); then
    echo "error: this script starts one node; use gpt2lab runs resume-command RUN --output slurm --nodes N" >&2
    exit 2
fi

# The trainer writes here where the status.json of this start is, and with which of its own exit codes it rejected a
# start: torchrun reports 1 for all.
said=$(mktemp -d) || exit
export GPT2LAB_STATUS_FILE="$said/status" GPT2LAB_EXIT_CODE_FILE="$said/code"
trap 'rm -rf "$said"' EXIT
: >"$GPT2LAB_STATUS_FILE"
"$TORCHRUN" --standalone --nproc_per_node="$NPROC" --shutdown-timeout="$GRACE" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    src/train.py "$@" --resume auto &
child=$!
asked=""
trap 'asked=yes; kill -TERM "$child" 2>/dev/null' TERM USR1
while wait "$child"; code=$?; kill -0 "$child" 2>/dev/null; do :; done

state="" verdict="" reason="" log="slurm-${SLURM_JOB_ID:-none}.missed"  # starts in a row without a status
if [[ -s $GPT2LAB_STATUS_FILE ]]; then  # else this start was rejected, or had nothing to do
    status=$(<"$GPT2LAB_STATUS_FILE")
    state=$(sed -nE 's/^ *"state": "([a-z]*)",?$/\1/p' "$status")
    verdict=$(sed -nE 's/^ *"exit_code": ([0-9]+),?$/\1/p' "$status")
    reason=$(sed -nE 's/^ *"reason": "(.*)",?$/\1/p' "$status")
    [[ -z $state ]] || rm -f "$log"
fi
echo "job ${SLURM_JOB_ID:-none}: the run is ${state:-as it was} (torchrun's exit code $code)"
case "$state:$reason" in
    completed:* | "stopped:STOP file" | stopped:stop_at | stopped:stop_after_steps | "stopped:early stopping") exit 0 ;;
esac
case "$state:${verdict:-none}" in
    failed:2 | failed:75 | failed:76) exit "$verdict" ;;  # a requeue would meet the same
    :*)  # without a status a crash, a signal before the run was begun, or a folder in use may pass
        [[ -s $GPT2LAB_EXIT_CODE_FILE ]] && code=$(<"$GPT2LAB_EXIT_CODE_FILE")
        case "$code" in 0 | 2 | 75 | 76 | 126 | 127) exit "$code" ;; esac ;;
esac
if [[ $state$asked != yes ]]; then
    # Starts since the last checkpoint (a stop before the first step saves none); a job that somebody submitted again
    # gets as many of its own.
    count='/"event": "checkpoint"/ { n = 0 } /"event": "begin"/ { n++ } END { print n + 0 }'
    starts=$MAX_CRASHES  # where they cannot be counted, as on a full disk
    if [[ -n $state ]]; then
        starts=$(awk "$count" "${status%/*}/metrics.jsonl")
    elif echo '"event": "begin"' >>"$log"; then
        starts=$(awk "$count" "$log")
    fi
    if ((starts >= MAX_CRASHES && ${SLURM_RESTART_COUNT:-0} + 1 >= MAX_CRASHES)); then
        [[ ${verdict:-0} == 0 ]] || code=$verdict
        echo "error: $starts starts without a new checkpoint; the last exit code was $code" >&2
        exit "$((code ? code : 1))"
    fi
fi
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi

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
# until status.json says `completed`, or that somebody stopped the run for good (a STOP file, --stop_after_steps, early
# stopping).
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-$PWD}" || exit

NPROC=${NPROC:-${SLURM_GPUS_ON_NODE:-1}}
TORCHRUN=${TORCHRUN:-.venv/bin/torchrun}
GRACE=110  # seconds between asking the workers to stop and killing them; torchrun's own is 30

name="" folder=checkpoints
for ((i = 1; i <= $#; i++)); do
    next=$((i + 1))
    case "${!i}" in
        --run_name=*) name=${!i#*=} ;;
        --run_name) name=${!next:-} ;;
        --checkpoint_dir=*) folder=${!i#*=} ;;
        --checkpoint_dir) folder=${!next:-} ;;
    esac
done
[[ -n $name ]] || { echo "error: --run_name is needed: the next job must find the run" >&2; exit 2; }

status="$folder/$name/status.json"
before=$(cksum "$status" 2>/dev/null)
"$TORCHRUN" --standalone --nproc_per_node="$NPROC" --shutdown-timeout="$GRACE" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    src/train.py "$@" --resume auto &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM USR1
while wait "$child"; code=$?; kill -0 "$child" 2>/dev/null; do :; done

state="" verdict="" reason=""
if [[ $(cksum "$status" 2>/dev/null) != "$before" ]]; then  # else this start was refused, or had nothing to do
    state=$(sed -nE 's/^ *"state": "([a-z]*)",?$/\1/p' "$status")
    verdict=$(sed -nE 's/^ *"exit_code": ([0-9]+),?$/\1/p' "$status")
    reason=$(sed -nE 's/^ *"reason": "(.*)",?$/\1/p' "$status")
fi
echo "job ${SLURM_JOB_ID:-none}: run $name is ${state:-unknown} (torchrun's exit code $code)"
case "$state:$reason" in
    completed:* | "stopped:STOP file" | stopped:stop_after_steps | "stopped:early stopping") exit 0 ;;
esac
case "$state:${verdict:-none}" in
    failed:2 | failed:75 | failed:76) exit "$verdict" ;;  # a requeue would meet the same
    :*) exit "$code" ;;
esac
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi

#!/usr/bin/env bash
# Start a run, and start it again after every crash, until it is complete or somebody asked it to stop:
#   scripts/run_until_done.sh torchrun --nproc_per_node=4 src/train.py --run_name gpt2-124m --model gpt2
# The command needs --run_name; `--resume auto` is added. The trainer's status.json says how a start ended, because
# torchrun reports 1 for a stop by signal as well as for a crash.
set -uo pipefail

MAX_CRASHES=${MAX_CRASHES:-5}    # in a row without a new checkpoint: then something is wrong that a restart cannot cure
PAUSE=${PAUSE:-10}               # seconds between starts

(($#)) || { echo "usage: scripts/run_until_done.sh COMMAND... --run_name NAME" >&2; exit 2; }
for word in "$@"; do
    case "$word" in --resume | --resume=*) echo "error: leave --resume out, it is added here" >&2; exit 2 ;; esac
done

field() { sed -nE "s/^ *\"$1\": \"?(.*[^\",])\"?,?$/\1/p" "$status" 2>/dev/null; }

# The trainer writes here where the status.json of this start is, and with which of its own exit codes it rejected a
# start: torchrun reports 1 for all.
said=$(mktemp -d) || exit 2
export GPT2LAB_STATUS_FILE="$said/status" GPT2LAB_EXIT_CODE_FILE="$said/code"
trap 'rm -rf "$said"' EXIT

child="" asked=""
ask() { asked=$1; [[ -n $child ]] && kill -s "$1" "$child" 2>/dev/null; }
trap 'ask TERM' INT  # what bash starts with `&` ignores SIGINT
trap 'ask TERM' TERM
trap 'ask HUP' HUP

crashes=0 newest="" status=""
while true; do
    if [[ -n $status && ! -e $status ]]; then  # --resume auto would begin it anew
        echo "error: ${status%/*}: moved or deleted; put it back (if it was moved) and start again" >&2
        exit 75
    fi
    : >"$GPT2LAB_STATUS_FILE"
    : >"$GPT2LAB_EXIT_CODE_FILE"
    "$@" --resume auto &
    child=$!
    while wait "$child"; code=$?; kill -0 "$child" 2>/dev/null; do :; done  # a trapped signal ends wait, not the child
    state=""
    if [[ -s $GPT2LAB_STATUS_FILE ]]; then  # else this start was rejected, or had nothing to do
        status=$(<"$GPT2LAB_STATUS_FILE")
        state=$(field state)
    fi
    case "$state" in
        completed | stopped) exit 0 ;;
    esac
    [[ -z $state && $code -eq 0 ]] && exit 0  # complete before this start
    [[ -n $asked ]] && exit "$code"
    verdict=$code
    [[ $state == failed ]] && verdict=$(field exit_code)
    [[ -s $GPT2LAB_EXIT_CODE_FILE ]] && verdict=$(<"$GPT2LAB_EXIT_CODE_FILE")
    case "$verdict" in
        2 | 75 | 76 | 126 | 127) echo "error: exit code $verdict: a restart would meet the same" >&2; exit "$verdict" ;;
    esac
    [[ $(field checkpoint) == "$newest" ]] && crashes=$((crashes + 1)) || crashes=1
    newest=$(field checkpoint)
    if ((crashes >= MAX_CRASHES)); then
        echo "error: $crashes crashes without a new checkpoint; the last exit code was $code" >&2
        exit 1
    fi
    echo "ended with exit code $code; starting again in $PAUSE s" >&2
    sleep "$PAUSE" &
    wait $!
    [[ -n $asked ]] && exit "$code"  # asked during the pause: nothing runs that could be stopped
done

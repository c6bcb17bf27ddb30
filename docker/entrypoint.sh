#!/usr/bin/env bash
# What a container starts: prepares the environment and becomes the command, under tini, which is PID 1.
#
#   no word at all             trainer probe: what this machine is, and how to go on
#   an option, or a command    trainer WORDS, once `trainer preflight` found nothing wrong
#   any other program          runs as it is
#
# Decisions are made in Python, by `trainer preflight`: here are only those that need no Python. Nothing is downloaded.
set -euo pipefail

COMMANDS=(plan train queue fetch cache probe sample score verify-lora export merge runs compare config families doctor ui health preflight)
SECRETS=(HF_TOKEN WANDB_API_KEY)
STOPPED=75
BAD_CONFIG=78

# fail WHERE WHAT REMEDY: an error as the trainer prints its own
fail() {
    printf 'error: bad configuration (exit code %d)\n%s: %s\n    -> %s\n' "$BAD_CONFIG" "$1" "$2" "$3" >&2
    exit "$BAD_CONFIG"
}

# file_env NAME: take NAME from the file that NAME_FILE names; an empty file is no value
file_env() {
    local name="$1" file_name="${1}_FILE"
    local file="${!file_name:-}" value="${!name:-}"
    [[ -n $file ]] || return 0
    if [[ -f $file && ! -s $file ]]; then # compose's no-token, which others may not read where the umask is 027
        unset "$file_name" && return
    elif [[ -n $value ]]; then
        fail "$file_name" "$name is set too" "leave one of them out"
    elif [[ -d $file ]]; then
        fail "$file_name" "$file is a folder" "Docker makes one where the file to mount does not exist: check that path"
    elif [[ ! -e $file ]]; then
        fail "$file_name" "there is no file $file" "mount it, or leave $file_name out"
    elif [[ ! -r $file ]]; then
        fail "$file_name" "$file cannot be read by user $(id -u):$(id -g)" "on the host: chmod or chown the file"
    fi
    value="$(<"$file")"
    value="${value%$'\r'}"
    unset "$file_name"
    if [[ -n $value ]]; then
        export "$name=$value"
    fi
}

# is_ours WORD: whether it is for the trainer
is_ours() {
    local command
    for command in "${COMMANDS[@]}"; do
        if [[ $1 == "$command" ]]; then
            return 0
        fi
    done
    # a word that no program has is a slip of the pen: the trainer says which command was meant
    [[ $1 == -* ]] || ! type -P -- "$1" >/dev/null
}

# check WORDS: end the script where `trainer preflight` refuses WORDS, or a stop is asked for meanwhile. Preflight
# hears of the stop: it may be telling other hosts of an error, which takes up to two minutes, and bash obeys no
# signal before a child in the foreground has ended
check() {
    local code asked='' again=yes
    trainer preflight -- "$@" &
    trap 'asked=yes again=yes; kill -TERM "$!" 2>/dev/null || true' TERM INT # children in the background ignore INT
    while [[ -n $again ]]; do # a signal ends the waiting, and its code is not preflight's
        again='' code=0
        wait "$!" || code=$?
    done
    trap 'exit "$STOPPED"' TERM INT
    # 143: ended by SIGTERM; another code is that of an error
    if [[ -n $asked && ($code == 0 || $code == 143) ]]; then
        exit "$STOPPED"
    elif [[ $code != 0 ]]; then
        exit "$code"
    fi
}

# a stop before the start is a stop as during a run
trap 'exit "$STOPPED"' TERM INT

for secret in "${SECRETS[@]}"; do
    file_env "$secret"
done
# libraries ask who runs them, and a container may have any user id, also one without a name
export USER="${USER:-trainer}"

if [[ ${1:-} == trainer ]]; then
    shift
elif [[ $# -gt 0 ]] && ! is_ours "$1"; then
    { : >"${TRAINER_RUNTIME_DIR:-/run/trainer}/no-run"; } 2>/dev/null || true # for `trainer health`, as preflight does
    exec -- "$@"
fi
if [[ $# -eq 0 ]]; then
    set -- probe
fi

check "$@"
exec trainer "$@"

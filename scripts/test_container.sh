#!/usr/bin/env bash
# Does an image work on this host? Trains for real in containers: GPU, kernels, a LoRA, health, stop, resume.
set -euo pipefail

# equal to GRACE_SECONDS of trainer/container/appliance.py (a test holds it)
readonly GRACE_SECONDS=1800
readonly STOPPED=75
readonly METRICS_PORT=9464
readonly SHORT_STEPS=20
readonly LONG_STEPS=1000000

usage() {
    cat <<HELP
Usage: scripts/test_container.sh IMAGE [--gpus WHICH | --cpu] [--timeout SECONDS] [--keep]

Tests an image on this host by what people do with it, on the tiny base model of this checkout: no network,
a read-only root, no capabilities, this user's id. It takes some minutes and about 1 GiB of disk.

  image    it is here, for this processor, and runs as a user that is not root
  version  the trainer in it starts
  gpu      a container sees a GPU                                  (not with --cpu)
  kernels  trainer probe: attention kernels, forward and backward  (not with --cpu)
  train    $SHORT_STEPS steps of train_configs/quickstart.yaml end with exit code 0 and a LoRA
  proof    trainer verify-lora reads that LoRA: finite, and not zero
  health   a long run turns healthy, for 'trainer health' and for Docker
  metrics  /readyz answers, and /metrics counts steps
  stop     docker stop ends with a checkpoint and exit code $STOPPED
  resume   the same command goes on from that checkpoint, and stops again with $STOPPED

  --gpus WHICH       what docker run --gpus gets; default: all
  --cpu              test the cpu image, or a GPU image without a GPU (TRAINER_PROFILE=cpu)
  --timeout SECONDS  longest wait for one check; default: 900
  --keep             keep the folder with logs and results, and say where it is
  --help             this text

One line for each check; the last line counts them. Containers are removed at the end, whatever happens.
Exit code: 0 all passed, 1 one failed, 2 a wrong argument.

Examples:
  scripts/test_container.sh trainer:0.1.0-hopper-fp8
  scripts/test_container.sh trainer:0.1.0-rtx-4090 --gpus device=0
  scripts/test_container.sh trainer:0.1.0-cpu --cpu
HELP
}

wrong() {
    echo "error: $1; --help explains" >&2
    exit 2
}

image='' gpus=all cpu='' timeout=900 keep=''
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --cpu) cpu=1 ;;
        --keep) keep=1 ;;
        --gpus)
            gpus=${2:-}
            [ -n "$gpus" ] || wrong "--gpus needs a value"
            shift
            ;;
        --timeout)
            timeout=${2:-}
            [[ $timeout =~ ^[1-9][0-9]*$ ]] || wrong "--timeout needs a number of seconds"
            shift
            ;;
        -*) wrong "unknown option '$1'" ;;
        *)
            [ -z "$image" ] || wrong "one IMAGE, not two ('$image' and '$1')"
            image=$1
            ;;
    esac
    shift
done
[ -n "$image" ] || wrong "name the IMAGE to test"
command -v docker >/dev/null || wrong "docker is not installed"

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
prefix=trainer-test-$$
passed=0 failed=0 started=()

# shellcheck disable=SC2329 # the trap below calls it
clean_up() {
    if [ "${#started[@]}" -gt 0 ]; then docker rm -f "${started[@]}" >/dev/null 2>&1 || true; fi
    if [ -n "$keep" ]; then
        echo "logs and results: $work"
    else
        rm -rf "$work"
    fi
}
trap clean_up EXIT
# without these a signal would end the script before clean_up
trap 'exit 130' INT
trap 'exit 143' TERM

pass() {
    passed=$((passed + 1))
    printf 'pass  %-8s %s\n' "$1" "$2"
}

# name, what is wrong, and the file of a log to quote from
fail() {
    failed=$((failed + 1))
    printf 'FAIL  %-8s %s\n' "$1" "$2"
    if [ -s "${3:-}" ]; then tail -n 15 "$3" | sed 's/^/        | /'; fi
}

summary() {
    printf '%d passed, %d failed\n' "$passed" "$failed"
    [ "$failed" -eq 0 ]
    exit
}

prepare_folders() {
    local owner
    mkdir -p "$work"/{data,models,cache,output}
    cp -r "$repository/examples/style" "$repository/examples/style-held-out" "$repository/assets/tiny-flux" "$work/data/"
    owner=$(id -u)
    if [ "$owner" = 0 ]; then
        # images refuse nobody, but what runs as root proves nothing about their own user
        owner=10001
        chown -R "$owner:0" "$work"
    fi
    options=(
        --user "$owner:0" --network none --read-only --cap-drop ALL --security-opt no-new-privileges
        --tmpfs "/tmp:exec,mode=1777" --tmpfs "/run/trainer:mode=1777"
        -v "$repository/train_configs:/config:ro" -v "$work/data:/data:ro"
        -v "$work/models:/models" -v "$work/cache:/cache" -v "$work/output:/output"
    )
    if [ -n "$cpu" ]; then options+=(-e TRAINER_PROFILE=cpu); else options+=(--gpus "$gpus"); fi
}

quickstart=(
    /config/quickstart.yaml --dataset /data/style
    --set model.pretrained_model_name_or_path=/data/tiny-flux
    --set validation.img_dir=/data/style-held-out
    --set 'validation.prompts=[unicorn]' --set validation.num_inference_steps=2
    --set train.lr_warmup_steps=2
)

# a command of the trainer in a container of its own; what it says goes to a log named after the check
in_container() {
    local log=$work/$1.log name=$prefix-$1
    shift
    started+=("$name")
    timeout "$timeout" docker run --rm --name "$name" "${options[@]}" "$image" "$@" >"$log" 2>&1
}

check_image() {
    local found architecture user machine
    if ! found=$(docker image inspect --format '{{.Architecture}} {{.Config.User}}' "$image" 2>"$work/image.log"); then
        fail image "Docker has no image $image here: build, pull or load it first" "$work/image.log"
        summary
    fi
    read -r architecture user <<<"$found"
    machine=$(uname -m)
    case $machine in x86_64) machine=amd64 ;; aarch64) machine=arm64 ;; esac
    if [ "$architecture" != "$machine" ]; then
        fail image "it is for $architecture, this host is $machine"
        summary
    fi
    case $user in
        '' | 0 | 0:* | root*) fail image "it runs as root (user '$user')" ;;
        *) pass image "$image: $architecture, user $user" ;;
    esac
}

check_version() {
    if in_container version --version; then
        pass version "$(tail -n 1 "$work/version.log")"
    else
        fail version "the trainer does not start" "$work/version.log"
    fi
}

check_gpu() {
    local name
    if ! in_container gpu probe; then
        fail gpu "trainer probe ended with an error" "$work/gpu.log"
    elif name=$(sed -nE 's/^GPU +(.+), compute capability .*/\1/p' "$work/gpu.log" | sed -n 1p) && [ -n "$name" ]; then
        pass gpu "$name"
    else
        fail gpu "no GPU in the container: run scripts/setup_host.sh" "$work/gpu.log"
    fi
}

check_kernels() {
    local works fails
    if ! in_container kernels probe "${quickstart[@]}"; then
        fail kernels "trainer probe ended with an error" "$work/kernels.log"
        return
    fi
    # attention.math is what a machine falls back on: it works where no other kernel does
    works=$(grep -E '^attention\.[a-z0-9_]+ +works' "$work/kernels.log" | grep -vc '^attention\.math ' || true)
    fails=$(sed -nE 's/^(attention\.[a-z0-9_]+) +FAILS.*/\1/p' "$work/kernels.log")
    fails=${fails:+, fails: ${fails//$'\n'/, }}
    if [ "$works" -gt 0 ]; then
        pass kernels "$works attention kernels beside the fallback work, forward and backward$fails"
    else
        fail kernels "no attention kernel works beside the fallback$fails" "$work/kernels.log"
    fi
}

check_train() {
    local code=0 lora
    in_container train train "${quickstart[@]}" --output /output/short --set "train.max_train_steps=$SHORT_STEPS" || code=$?
    lora=$work/output/short/lora/short.safetensors
    if [ "$code" -ne 0 ]; then
        fail train "exit code $code instead of 0" "$work/train.log"
    elif [ ! -s "$lora" ]; then
        fail train "exit code 0, but there is no LoRA at output/short/lora" "$work/train.log"
    elif [ -z "$cpu" ] && grep -qE '^profile +cpu ' "$work/train.log"; then
        fail train "it trained on the CPU" "$work/train.log"
    else
        pass train "$SHORT_STEPS steps, $(wc -c <"$lora") bytes of LoRA"
    fi
    if in_container proof verify-lora /output/short/lora/short.safetensors; then
        pass proof "$(tail -n 1 "$work/proof.log")"
    else
        fail proof "verify-lora refuses the file" "$work/proof.log"
    fi
}

running() { [ "$(docker inspect --format '{{.State.Running}}' "$1" 2>/dev/null)" = true ]; }

start_long() {
    local name=$prefix-$1 more=()
    # compiled blocks need the compiler that the image carries
    if [ -z "$cpu" ]; then more=(--set features.compile=true); fi
    started+=("$name")
    docker run -d --name "$name" "${options[@]}" "$image" train "${quickstart[@]}" --output /output/long \
        --set "train.max_train_steps=$LONG_STEPS" --set checkpoint.checkpointing_steps=100000 \
        --set validation.every_steps=100000 "${more[@]}" >"$work/$1.log" 2>&1
}

# until the run of container $1 trains, and Docker too calls it healthy
wait_healthy() {
    local deadline=$((SECONDS + timeout)) said=''
    while running "$1"; do
        said=$(docker exec "$1" trainer health 2>&1 || true)
        if [[ $said == "healthy: phase train"* ]] &&
            [ "$(docker inspect --format '{{.State.Health.Status}}' "$1" 2>/dev/null)" = healthy ]; then
            printf '%s\n' "$said"
            return 0
        fi
        if [ "$SECONDS" -ge "$deadline" ]; then break; fi
        sleep 1
    done
    printf '%s\n' "${said:-the container ended}"
    return 1
}

# the answer of the trainer's server, asked from inside: the container has no network
ask() {
    docker exec "$1" python3 -c "
import http.client
connection = http.client.HTTPConnection('127.0.0.1', $METRICS_PORT, timeout=10)
connection.request('GET', '$2')
answer = connection.getresponse()
print(answer.read().decode())
raise SystemExit(answer.status != 200)"
}

check_health() {
    local name=$prefix-long said
    if ! start_long long; then
        fail health "docker run failed" "$work/long.log"
    elif said=$(wait_healthy "$name"); then
        pass health "$said"
    else
        docker logs "$name" >"$work/long.log" 2>&1 || true
        fail health "not healthy within $timeout s: $said" "$work/long.log"
    fi
}

# until the run of container $1 is ready and beyond step $2; `step` is where it is
wait_step() {
    local deadline=$((SECONDS + timeout))
    step=0
    while running "$1"; do
        if ask "$1" /readyz >"$work/ready.log" 2>&1 && ask "$1" /metrics >"$work/metrics.log" 2>&1; then
            step=$(sed -nE 's/^trainer_step ([0-9]+).*/\1/p' "$work/metrics.log")
            step=${step:-0}
            if [ "$step" -gt "$2" ]; then return; fi
        fi
        if [ "$SECONDS" -ge "$deadline" ]; then return 1; fi
        sleep 1
    done
    return 1
}

check_metrics() {
    local name=$prefix-long step
    if ! running "$name"; then
        fail metrics "the long run is not running"
        return
    fi
    if wait_step "$name" 0 && grep -qE '^trainer_healthy 1(\.0)?$' "$work/metrics.log"; then
        pass metrics "ready, trainer_step $step"
    else
        fail metrics "no steps, or trainer_healthy is not 1" "$work/metrics.log"
    fi
}

# the step of the newest whole checkpoint of the long run, 0 without one
newest_checkpoint() {
    find "$work/output" -path '*/long/checkpoints/step-*' -prune |
        sed -nE 's/.*\/step-0*([0-9]+)$/\1/p' | sort -n | tail -n 1 | grep . || echo 0
}

# docker stop on container $2; the check $1 passes with exit code 75 and a checkpoint that was not there before
stop_run() {
    local check=$1 name=$2 code before after
    if ! running "$name"; then
        fail "$check" "the long run is not running"
        return
    fi
    before=$(newest_checkpoint)
    docker stop -t "$GRACE_SECONDS" "$name" >/dev/null 2>&1 || true
    docker logs "$name" >"$work/$check.log" 2>&1 || true
    code=$(docker inspect --format '{{.State.ExitCode}}' "$name" 2>/dev/null || echo unknown)
    after=$(newest_checkpoint)
    if [ "$code" != "$STOPPED" ]; then
        fail "$check" "exit code $code instead of $STOPPED" "$work/$check.log"
    elif [ "$after" -le "$before" ]; then
        fail "$check" "exit code $STOPPED, but there is no new checkpoint" "$work/$check.log"
    else
        pass "$check" "exit code $STOPPED, a checkpoint of step $after"
    fi
}

check_resume() {
    local name=$prefix-again said step
    if ! start_long again; then
        fail resume "docker run failed" "$work/again.log"
    elif ! said=$(wait_healthy "$name"); then
        docker logs "$name" >"$work/again.log" 2>&1 || true
        fail resume "not healthy within $timeout s: $said" "$work/again.log"
    else
        docker logs "$name" >"$work/again.log" 2>&1 || true
        if grep -q 'resumed from step-' "$work/again.log"; then
            # a stop before its first step would have nothing new to save
            wait_step "$name" "$(newest_checkpoint)" || true
            stop_run resume "$name"
        else
            fail resume "it began anew in place of going on" "$work/again.log"
        fi
    fi
}

prepare_folders
check_image
check_version
if [ -z "$cpu" ]; then
    check_gpu
    check_kernels
fi
check_train
check_health
check_metrics
stop_run stop "$prefix-long"
check_resume
summary

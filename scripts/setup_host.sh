#!/usr/bin/env bash
# Is this host ready for the trainer's containers? Says for each part that it is, or what to do.
set -euo pipefail

# CUDA 13 needs this branch of the driver; equal to trainer/planning/torch_and_driver.py (a test holds it)
readonly MIN_DRIVER=580
# the first toolkit that handles DGX Spark
readonly MIN_TOOLKIT=1.17.7
# the first Docker that reads CDI specifications
readonly MIN_DOCKER_GPU=25.0
# the first with the builder that the Dockerfile needs, without a plugin
readonly MIN_DOCKER_CPU=20.10
# the first that starts helpers without attaching to them
readonly MIN_COMPOSE=2.20
# Debian 12 has Docker 20.10, Compose 1.29 and no buildx; 13 has 26.1, 2.26 and 0.13
readonly FIRST_DEBIAN=13
# an image for GPUs, its build cache and the next version of it; base models need more: see DOCKER.md
readonly MIN_DISK_GIB=40
readonly MAX_SHM_USED_MIB=1024
readonly CDI_FILE=/etc/cdi/nvidia.yaml
# a test gives another one; files below it are only read
readonly HOST_ROOT=${HOST_ROOT:-}

usage() {
    cat <<HELP
Usage: scripts/setup_host.sh [--cpu | --apply [--yes]]

Checks what a host needs to run the trainer's images: the NVIDIA driver ($MIN_DRIVER or newer), the
NVIDIA Container Toolkit ($MIN_TOOLKIT or newer), Docker ($MIN_DOCKER_GPU or newer) with Compose v2, the way from
Docker to the GPU, disk, shared memory, and whether this user may use Docker.

Each line begins with
  ok     this part is as it should be
  note   nothing must be done, but it is good to know
  TO DO  what to do follows, as commands to paste

Nothing is changed without --apply.

  --cpu    a host for the cpu image: no driver, no container toolkit, and Docker $MIN_DOCKER_CPU or newer
  --apply  run what configures the container toolkit, and nothing else:
             nvidia-ctk runtime configure --runtime=docker   (writes /etc/docker/daemon.json)
             nvidia-ctk cdi generate --output=$CDI_FILE
           It installs no package. Docker must be restarted to read its file: you are asked first, because
           that ends running containers.
  --yes    with --apply: restart Docker without asking
  --help   this text

Exit code: 0 everything is ok, 1 something is to do, 2 a wrong argument.

Examples:
  scripts/setup_host.sh            # look
  scripts/setup_host.sh --apply    # configure the toolkit, then look again
HELP
}

apply='' yes='' cpu=''
for argument in "$@"; do
    case $argument in
        --cpu) cpu=1 ;;
        --apply) apply=1 ;;
        --yes) yes=1 ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            echo "error: unknown argument '$argument'; --help lists them" >&2
            exit 2
            ;;
    esac
done
if [ -n "$yes" ] && [ -z "$apply" ]; then
    echo "error: --yes only means something with --apply" >&2
    exit 2
fi
if [ -n "$cpu" ] && [ -n "$apply" ]; then
    echo "error: --apply configures GPUs for Docker, and --cpu says that there are none" >&2
    exit 2
fi
min_docker=$MIN_DOCKER_GPU
if [ -n "$cpu" ]; then min_docker=$MIN_DOCKER_CPU; fi

good=0 to_do=0

ok() {
    good=$((good + 1))
    printf 'ok     %s\n' "$1"
}

note() { printf 'note   %s\n' "$1"; }

# what is wrong, then one line for each thing to do
todo() {
    to_do=$((to_do + 1))
    printf 'TO DO  %s\n' "$1"
    shift
    printf '         -> %s\n' "$@"
}

have() { command -v "$1" >/dev/null 2>&1; }

# whether version $1 is $2 or newer
at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | sed -n 1p)" = "$2" ]; }

# empty where there is none
first_version() { grep -oE '[0-9]+(\.[0-9]+)+' <<<"$1" | sed -n 1p || true; }

# a field of os-release; empty where there is none
os_field() { sed -n "s/^$1=//p" "$HOST_ROOT/etc/os-release" 2>/dev/null | tr -d '"' || true; }

os_family() {
    case " $(os_field ID) $(os_field ID_LIKE) " in
        *" ubuntu "*) echo ubuntu ;;
        *" debian "*) echo debian ;;
        *" fedora "* | *" rhel "* | *" centos "*) echo fedora ;;
        *" suse "* | *" opensuse "*) echo suse ;;
        *) echo other ;;
    esac
}

os=$(os_family)

# whether it is Debian itself, of a release whose Docker and Compose are too old
is_old_debian() {
    local version
    version=$(os_field VERSION_ID)
    [ "$(os_field ID)" = debian ] && [ -n "$version" ] && ! at_least "$version" "$FIRST_DEBIAN"
}

# how packages are installed here
install_line() {
    case $os in
        ubuntu | debian) echo "sudo apt-get update && sudo apt-get install -y $*" ;;
        fedora) echo "sudo dnf install -y $*" ;;
        suse) echo "sudo zypper install -y $*" ;;
        *) echo "install with your distribution's tools: $*" ;;
    esac
}

# Docker's parts have other names in each distribution: only known ones are written out
docker_line() {
    case $os in
        ubuntu) install_line docker.io docker-buildx docker-compose-v2 ;;
        debian)
            if is_old_debian; then
                echo "the packages of Debian $(os_field VERSION_ID) are too old: install Docker Engine with its plugins buildx and compose" \
                    "from Docker's own repository, as its manual for Debian says"
            else
                install_line docker.io docker-cli docker-buildx docker-compose
            fi
            ;;
        *) echo "install Docker Engine with its plugins buildx and compose, as Docker's manual says" ;;
    esac
}

in_wsl() { grep -qi microsoft "$HOST_ROOT/proc/version" 2>/dev/null; }

driver_remedy() {
    if in_wsl; then
        echo "this is WSL: install driver $MIN_DRIVER or newer in Windows, none inside Linux, then: wsl --shutdown"
        return
    fi
    case $os in
        ubuntu) echo "sudo apt-get update && sudo apt-get install -y nvidia-driver-$MIN_DRIVER-open && sudo reboot" ;;
        debian | fedora | suse) echo "install driver $MIN_DRIVER or newer from NVIDIA's repository for this distribution, then reboot" ;;
        *) echo "install NVIDIA driver $MIN_DRIVER or newer with your distribution's tools, then reboot" ;;
    esac
    echo "DGX systems get it by their own update: sudo apt-get update && sudo apt-get dist-upgrade && sudo reboot"
}

check_architecture() {
    local machine
    machine=$(uname -m)
    case $machine in
        x86_64 | aarch64) ok "processor: $machine" ;;
        *) todo "processor: there are no images for $machine" "use a host with x86_64 or aarch64" ;;
    esac
}

check_driver() {
    local version remedy
    mapfile -t remedy < <(driver_remedy)
    if ! have nvidia-smi; then
        todo "driver: nvidia-smi is not here, so there is no NVIDIA driver" "${remedy[@]}" \
            "a host without a GPU needs none: scripts/setup_host.sh --cpu"
        return
    fi
    if ! version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1); then
        todo "driver: nvidia-smi fails: $(sed -n 1p <<<"$version")" \
            "after an update of the driver: sudo reboot" "${remedy[@]}"
        return
    fi
    version=$(first_version "$version")
    if [ -z "$version" ]; then
        todo "driver: nvidia-smi does not tell its version" "after an update of the driver: sudo reboot" "${remedy[@]}"
    elif at_least "$version" "$MIN_DRIVER"; then
        ok "driver: $version ($MIN_DRIVER or newer is needed)"
    else
        todo "driver: $version is too old for CUDA 13, $MIN_DRIVER or newer is needed" "${remedy[@]}" \
            "a GeForce card has no forward compatibility package: the driver itself must be new"
    fi
}

# the profile that fits a GPU: $1 its compute capability, $2 its name
profile_for() {
    case $1 in
        12.1) echo dgx-spark ;;
        9.0) echo hopper-fp8 ;;
        8.9) case $2 in *4090*) echo rtx-4090 ;; *) echo generic-cuda ;; esac ;;
        *) echo generic-cuda ;;
    esac
}

check_gpus() {
    local name capability
    have nvidia-smi || return 0
    while IFS=, read -r capability name; do
        capability=${capability// /}
        name=${name# }
        case $capability in
            [0-9]*.[0-9]*) ok "GPU: $name, compute capability $capability: image and profile $(profile_for "$capability" "$name")" ;;
        esac
    done < <(nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2>/dev/null || true)
}

check_docker() {
    local version
    if ! have docker; then
        todo "Docker: not installed" \
            "$(docker_line)"
        return 1
    fi
    if ! version=$(docker version --format '{{.Server.Version}}' 2>/dev/null) || [ -z "$version" ]; then
        todo "Docker: the engine does not answer this user" \
            "sudo systemctl enable --now docker" "see 'user' below for who may use it"
        return 1
    fi
    if at_least "$version" "$min_docker"; then
        ok "Docker: $version ($min_docker or newer is needed)"
    else
        todo "Docker: $version is too old, $min_docker or newer is needed" \
            "$(docker_line)"
    fi
}

check_plugins() {
    local version
    have docker || return 0
    if version=$(docker compose version --short 2>/dev/null) && at_least "${version#v}" "$MIN_COMPOSE"; then
        ok "Compose: ${version#v} ($MIN_COMPOSE or newer is needed)"
    else
        todo "Compose: ${version:-not there}, v2 ($MIN_COMPOSE or newer) is needed; docker-compose with a hyphen is not it" \
            "$(docker_line)" "with Docker's own packages the plugin is docker-compose-plugin"
    fi
    if version=$(docker buildx version 2>/dev/null); then
        ok "buildx: $(first_version "$version")"
    else
        note "buildx: not there; only building images needs it ($(docker_line))"
    fi
}

check_toolkit() {
    local version
    if ! have nvidia-ctk; then
        todo "container toolkit: nvidia-ctk is not here" \
            "add NVIDIA's repository for the container toolkit, as its installation guide says, then:" \
            "$(install_line nvidia-container-toolkit)"
        return 1
    fi
    version=$(first_version "$(nvidia-ctk --version 2>/dev/null || true)")
    if at_least "${version:-0}" "$MIN_TOOLKIT"; then
        ok "container toolkit: $version ($MIN_TOOLKIT or newer is needed)"
    else
        todo "container toolkit: ${version:-unknown} is too old, $MIN_TOOLKIT or newer is needed" \
            "$(install_line nvidia-container-toolkit)"
    fi
}

# grep -q in a pipe would end its writer early, which pipefail takes for a failure: these read to the end
docker_has_runtime() { [[ $(docker info --format '{{json .Runtimes}}' 2>/dev/null) == *'"nvidia"'* ]]; }

cdi_devices() { nvidia-ctk cdi list 2>/dev/null | grep -c 'nvidia\.com/gpu=' || true; }

has_cdi() { [ "$(cdi_devices)" -gt 0 ]; }

check_gpu_access() {
    if docker_has_runtime; then
        ok "Docker's runtime: nvidia is registered"
    else
        todo "Docker's runtime: nvidia is not registered" \
            "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker" \
            "or: scripts/setup_host.sh --apply"
    fi
    if has_cdi; then
        ok "CDI: $(cdi_devices) devices (nvidia.com/gpu=...)"
    else
        todo "CDI: there is no specification of the GPUs" \
            "sudo nvidia-ctk cdi generate --output=$CDI_FILE   (again after each update of the driver)" \
            "or: scripts/setup_host.sh --apply"
    fi
}

check_disk() {
    local folder free_kib free_gib
    folder=$(docker info --format '{{.DockerRootDir}}' 2>/dev/null || true)
    [ -d "$folder" ] || folder=/
    free_kib=$(df -Pk "$folder" 2>/dev/null | awk 'NR == 2 { print $4 }' || true)
    free_gib=$((${free_kib:-0} / 1024 / 1024))
    if [ -z "$free_kib" ]; then
        todo "disk: df does not tell what is free at $folder" "df -Pk $folder"
    elif [ "$free_gib" -ge "$MIN_DISK_GIB" ]; then
        ok "disk: $free_gib GiB free at $folder ($MIN_DISK_GIB GiB or more are needed for images)"
    else
        todo "disk: $free_gib GiB free at $folder, images need $MIN_DISK_GIB GiB" \
            "docker system df          (what takes the room)" \
            "docker image prune        (removes images without a name)"
    fi
}

check_shm() {
    local used_mib
    used_mib=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print int($3 / 1024) }' || true)
    if [ -z "$used_mib" ]; then
        todo "shared memory: /dev/shm is not mounted" "sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
    elif [ "$used_mib" -gt "$MAX_SHM_USED_MIB" ]; then
        todo "shared memory: $used_mib MiB lie in /dev/shm, taken from main memory (on a DGX Spark from the GPU's)" \
            "ls -l /dev/shm            (containers that were killed with --ipc=host leave such files)" \
            "remove what no process uses; a reboot empties it"
    else
        ok "shared memory: $used_mib MiB used in /dev/shm"
    fi
}

check_user() {
    local user groups
    user=$(id -un)
    groups=" $(id -nG) "
    if [ "$(id -u)" = 0 ] || [[ $groups == *" docker "* ]]; then
        ok "user: $user may use Docker"
    elif docker version --format '{{.Server.Version}}' >/dev/null 2>&1; then
        ok "user: $user reaches an engine without the group docker"
    else
        todo "user: $user is not in the group docker" \
            "sudo usermod -aG docker $user     (then log in again; the group is as good as root)"
    fi
}

as_root() {
    printf '+ %s\n' "$*"
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

restart_docker() {
    local running answer=''
    running=$(docker ps -q 2>/dev/null | wc -l || true)
    if [ -z "$yes" ]; then
        printf 'Restart Docker now? %s containers are running and may end. [y/N] ' "$((running))"
        read -r answer || true
        case $answer in
            y | Y | yes) ;;
            *)
                printf '\nDocker was not restarted. Do it with: sudo systemctl restart docker\n'
                return 0
                ;;
        esac
    fi
    as_root systemctl restart docker
}

apply_changes() {
    local restart=''
    if ! have nvidia-ctk; then
        echo "--apply: nothing can be configured before the container toolkit is installed"
        return
    fi
    if have docker && ! docker_has_runtime; then
        as_root nvidia-ctk runtime configure --runtime=docker
        restart=1
    fi
    if ! has_cdi; then
        as_root nvidia-ctk cdi generate --output="$CDI_FILE"
    fi
    if [ -n "$restart" ]; then restart_docker; fi
    echo
}

if [ -n "$apply" ]; then apply_changes; fi
check_architecture
if [ -z "$cpu" ]; then
    check_driver
    check_gpus
fi
docker_answers=1
check_docker || docker_answers=''
check_plugins
if [ -z "$cpu" ] && check_toolkit && [ -n "$docker_answers" ]; then check_gpu_access; fi
check_disk
check_shm
check_user
printf '\n%d ok, %d to do\n' "$good" "$to_do"
[ "$to_do" -eq 0 ]

#!/usr/bin/env bash
# A real SLURM with two nodes on this one machine, to try LAUNCH.MODE slurm and to test it. Needs root; installs
# Debian's packages when they are missing. Nothing outside FOLDER is touched, and a SLURM of this machine is left alone.
#
#     eval "$(./dev/slurm_local.sh start [FOLDER])"    # then sbatch, squeue and pycls use it, by SLURM_CONF
#     ./dev/slurm_local.sh status [FOLDER]
#     ./dev/slurm_local.sh stop [FOLDER]
#
# Nodes n1 and n2 (4 cores, 4 GB and 2 pretended GPUs each) in two partitions: batch, for at most a day, whose jobs are
# put back into the queue when a job in urgent needs their place.
set -euo pipefail

action="${1:-}"
folder="${2:-${TMPDIR:-/tmp}/pycls-slurm-$(id -u)}"
packages="slurmctld slurmd slurm-client munge"

say() { echo "slurm_local: $*" >&2; }
fail() { say "$*"; exit 3; }

install_packages() {
    if command -v slurmctld slurmd sbatch munged >/dev/null; then return; fi
    command -v apt-get >/dev/null || fail "SLURM is not installed and there is no apt-get to install $packages"
    say "installing $packages"
    # shellcheck disable=SC2086
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages; } \
        >"$folder/apt.log" 2>&1 || fail "$packages could not be installed: $(tail -n 1 "$folder/apt.log")"
}

free_ports() {
    python3 -c 'import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(s.getsockname()[1] for s in sockets))'
}

configure() {
    local control first second
    read -r control first second <<<"$(free_ports)"
    mkdir -p "$folder/state" "$folder/spool" "$folder/log" "$folder/run"
    cat >"$folder/slurm.conf" <<CONF
ClusterName=pycls-local
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is put back may start once its old credential has expired: by default only after two minutes.
AuthInfo=socket=$folder/run/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmctldPort=$control
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$first CPUs=4 RealMemory=4000 Gres=gpu:2 Feature=pretended
NodeName=n2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$second CPUs=4 RealMemory=4000 Gres=gpu:2 Feature=pretended
PartitionName=batch Nodes=n1,n2 Default=YES MaxTime=1-0 PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=urgent Nodes=n1,n2 MaxTime=1-0 PriorityTier=10 PreemptMode=OFF State=UP
CONF
    # SLURM wants a device file for each; any will do to pretend.
    printf 'Name=gpu File=/dev/%s\n' zero full >"$folder/gres.conf"
    echo "CgroupMountpoint=/sys/fs/cgroup" >"$folder/cgroup.conf"
    head -c 1024 /dev/urandom >"$folder/munge.key"
    chmod 600 "$folder/munge.key"
}

# What runs of this cluster: its daemons and the watchers of its job steps, by their own SLURM_CONF.
running() {
    local process name
    for process in /proc/[0-9]*; do
        name="$(cat "$process/comm" 2>/dev/null)" || continue
        case "$name" in
            slurmctld | slurmd | slurmstepd | munged)
                if tr '\0' '\n' 2>/dev/null <"$process/environ" | grep -qxF "SLURM_CONF=$folder/slurm.conf"; then
                    echo "${process#/proc/}"
                fi ;;
        esac
    done
}

ready() { [ "$(sinfo -h -N -p batch -t idle,alloc,mix -o %N 2>/dev/null | sort -u | wc -l)" = 2 ]; }

wait_for() {
    local left=$(($1 * 5))
    shift
    until "$@"; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || return 1
        sleep 0.2
    done
}

gone() { [ -z "$(running)" ]; }
no_jobs() { [ -z "$(squeue -h 2>/dev/null)" ]; }

start() {
    if [ -n "$(running)" ]; then
        if ready; then
            say "is running already in $folder"
            return
        fi
        stop
    fi
    mkdir -p -m 700 "$folder"
    [ -O "$folder" ] && [ ! -L "$folder" ] || fail "$folder belongs to somebody else"
    install_packages
    rm -rf "$folder/state" "$folder/spool" "$folder/log" "$folder/run"
    configure
    {
        munged --force --key-file="$folder/munge.key" --socket="$folder/run/munge.socket" \
            --pid-file="$folder/run/munged.pid" --log-file="$folder/log/munged.log" --seed-file="$folder/run/munge.seed"
        slurmctld -c
        slurmd -N n1
        slurmd -N n2
    } >"$folder/log/start.log" 2>&1 </dev/null || { stop; fail "a daemon did not start: $(tail -n 1 "$folder/log/start.log")"; }
    wait_for 30 ready || { stop; fail "the nodes did not come up; see $folder/log"; }
    say "nodes n1 and n2 are up; stop them with: $0 stop $folder"
}

stop() {
    if [ -n "$(running)" ]; then
        # Jobs first: their processes would outlive the daemons.
        timeout 10 scancel --state=PENDING >/dev/null 2>&1 || true
        timeout 10 scancel --user="$(id -un)" >/dev/null 2>&1 || true
        wait_for 40 no_jobs || say "jobs did not end in time"
        # shellcheck disable=SC2046
        kill $(running) 2>/dev/null || true
        if ! wait_for 15 gone; then
            # shellcheck disable=SC2046
            kill -9 $(running) 2>/dev/null || true
        fi
        say "stopped"
    fi
    rm -rf "$folder/state" "$folder/spool" "$folder/run"
}

case "$action" in
    start)
        [ "$(id -u)" = 0 ] || fail "starting SLURM needs root"
        mkdir -p -m 700 "$folder"
        folder="$(realpath "$folder")"
        export SLURM_CONF="$folder/slurm.conf"
        start
        echo "export SLURM_CONF='$SLURM_CONF'" ;;
    status | stop)
        folder="$(realpath -m "$folder")"
        export SLURM_CONF="$folder/slurm.conf"
        if [ "$action" = stop ]; then
            stop
        elif [ -n "$(running)" ] && ready; then
            say "running in $folder"
            sinfo -N -l >&2
            echo "export SLURM_CONF='$SLURM_CONF'"
        else
            say "not running in $folder"
            exit 1
        fi ;;
    *)
        sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
        exit 2 ;;
esac

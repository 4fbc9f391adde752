#!/usr/bin/env bash
# A private, throw-away Slurm of several nodes on this machine, for development and tests.
#
#   cluster.sh start      start it (nothing to do when it runs) and print the line to eval
#   cluster.sh stop       end its jobs and daemons, whatever state they are in
#   cluster.sh restart    stop, then start
#   cluster.sh status     show the nodes; exit 0 when all of them are up
#   cluster.sh env        print the line to eval: eval "$(slurm/cluster.sh env)"
#
# Needs Debian's slurm-wlm and munge; no root, no system service, no cgroups. Writes below CLUSTER_DIR only.
# Clusters with different folders stand side by side. Nodes are named by their addresses, 127.0.0.2 and on,
# so that the first host of a job is a rendezvous address. GPUs are links to /dev/null that Slurm hands out.
#
# Environment:
#   CLUSTER_DIR      folder of its state (default /tmp/acbench-slurm.<uid>); short: it holds Unix sockets
#   CLUSTER_NODES    nodes (default 2)
#   CLUSTER_CPUS     CPUs each node claims to have (default 8)
#   CLUSTER_GPUS     GPUs each node claims to have (default 4)
#   CLUSTER_MEM_MIB  memory each node claims to have (default 8000)
#   CLUSTER_SET      settings of slurm.conf that replace those below, by spaces: "MaxArraySize=4 MinJobAge=2"
set -euo pipefail

DIR=${CLUSTER_DIR:-/tmp/acbench-slurm.$(id -u)}
NODES=${CLUSTER_NODES:-2}
CPUS=${CLUSTER_CPUS:-8}
GPUS=${CLUSTER_GPUS:-4}
MEM_MIB=${CLUSTER_MEM_MIB:-8000}
CONF=$DIR/etc/slurm.conf
ATTEMPTS=3      # another program may take a port between its choice and its use
START_S=30
STOP_S=10
SOCKET_BYTES=80 # of CLUSTER_DIR: a Unix socket's path may have 107 bytes
PATH=$PATH:/usr/sbin:/sbin

main() {
  case ${1:-} in
    start) start ;;
    stop) stop ;;
    restart) stop && start ;;
    status) [ -f "$CONF" ] && SLURM_CONF=$CONF sinfo --Node --long && is_up ;;
    env) print_env ;;
    *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" >&2 && exit 2 ;;
  esac
}

start() {
  if is_running; then print_env && return; fi
  require
  for ((attempt = 1; attempt <= ATTEMPTS; attempt++)); do
    stop
    prepare
    if start_daemons && wait_for "$START_S" is_up; then print_env && return; fi
  done
  stop
  grep -hE 'error|fatal' "$DIR"/log/*.log | tail -n 20 >&2 || true
  die "the cluster did not come up; its logs are in $DIR/log"
}

stop() {
  wait_for "$STOP_S" has_no_processes || die "these survived SIGKILL: $(processes | tr '\n' ' ')"
  rm -rf "${DIR:?}"/{dev,etc,run,spool,state}
}

require() {
  local program
  for program in munged sbatch slurmctld slurmd srun; do
    command -v "$program" >/dev/null || die "$program not found; apt-get install slurm-wlm munge"
  done
  [ ${#DIR} -le $SOCKET_BYTES ] || die "CLUSTER_DIR: must be at most $SOCKET_BYTES bytes, got $DIR"
}

# --- files

prepare() {
  rm -rf "$DIR/log"
  mkdir -p "$DIR"/{dev,etc,log,run,spool,state}
  chmod 755 "$DIR" "$DIR"/*
  (umask 077 && head -c 128 /dev/urandom >"$DIR/etc/munge.key")
  write_gres
  write_cgroup
  write_conf
}

write_gres() {
  echo "AutoDetect=off" >"$DIR/etc/gres.conf"
  local gpu
  for ((gpu = 0; gpu < GPUS; gpu++)); do
    ln -s /dev/null "$DIR/dev/gpu$gpu" # Slurm reads the number from the name, and wants a device
    echo "NodeName=$(node_list) Name=gpu File=$DIR/dev/gpu$gpu" >>"$DIR/etc/gres.conf"
  done
}

write_cgroup() { # nothing uses cgroups, but slurmd wants to be told so, and in its own version's words
  local plugin=cgroup/v1 version
  version=$(slurmctld -V | grep -oE '[0-9]+\.[0-9]+' | head -n 1)
  [ "$(printf '%s\n23.11\n' "$version" | sort -V | head -n 1)" = 23.11 ] && plugin=disabled
  echo "CgroupPlugin=$plugin" >"$DIR/etc/cgroup.conf"
}

write_conf() {
  local host ports node
  host=$(hostname -s)
  read -ra ports <<<"$(free_ports $((NODES + 1)))"
  {
    settings "$host" "${ports[0]}"
    for ((node = 1; node <= NODES; node++)); do
      echo "NodeName=$(node_name "$node") NodeHostname=$host NodeAddr=$(node_name "$node") Port=${ports[node]}" \
        "CPUs=$CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$MEM_MIB" \
        "Gres=gpu:$GPUS State=UNKNOWN"
    done
    echo "PartitionName=main Nodes=ALL Default=YES PriorityTier=2 PreemptMode=OFF"
    echo "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE" # a job in high ends those in low
    echo "PartitionName=high Nodes=ALL PriorityTier=3 PreemptMode=OFF"
  } >"$CONF"
}

settings() {
  local host=$1 port=$2 word
  declare -A set=(
    [ClusterName]=private
    [SlurmctldHost]="$host(127.0.0.1)"
    [SlurmctldPort]=$port
    [SlurmUser]=$(id -un)
    [SlurmdUser]=$(id -un)
    [AuthType]=auth/munge
    [AuthInfo]="socket=$DIR/run/munge.sock,cred_expire=10" # also how long a requeued job waits; 120 s otherwise
    [StateSaveLocation]=$DIR/state
    [SlurmdSpoolDir]=$DIR/spool/%n
    [SlurmctldPidFile]=$DIR/run/slurmctld.pid
    [SlurmdPidFile]=$DIR/run/slurmd-%n.pid
    [SlurmctldLogFile]=$DIR/log/slurmctld.log
    [SlurmdLogFile]=$DIR/log/slurmd-%n.log
    [GresTypes]=gpu
    [SelectType]=select/cons_tres
    [SelectTypeParameters]=CR_Core
    [SchedulerParameters]="batch_sched_delay=0,sched_interval=1,bf_interval=1"
    [PreemptType]=preempt/partition_prio
    [PreemptMode]=REQUEUE
    [ProctrackType]=proctrack/linuxproc
    [TaskPlugin]=task/none
    [MpiDefault]=none
    [SlurmdParameters]=config_overrides # nodes have the CPUs and the memory that they claim
    [ReturnToService]=2
    [SlurmdTimeout]=30
    [KillWait]=3
    [MessageTimeout]=30
    [MinJobAge]=3600
    [MaxArraySize]=1001
  )
  for word in ${CLUSTER_SET:-}; do
    set[${word%%=*}]=${word#*=}
  done
  for word in "${!set[@]}"; do
    echo "$word=${set[$word]}"
  done
}

free_ports() { # below the ports that the kernel gives to clients
  python3 - "$1" <<'EOP'
import random, socket, sys

ports = set()
while len(ports) < int(sys.argv[1]):
    port = random.randrange(20000, 32000)
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            continue
    ports.add(port)
print(*ports)
EOP
}

node_name() { echo "127.0.0.$(($1 + 1))"; }

node_list() { echo "127.0.0.[2-$((NODES + 1))]"; }

# --- processes

start_daemons() {
  local node
  (
    exec >>"$DIR/log/start.log" 2>&1
    export SLURM_CONF=$CONF
    munged --force --key-file="$DIR/etc/munge.key" --socket="$DIR/run/munge.sock" \
      --pid-file="$DIR/run/munged.pid" --log-file="$DIR/log/munged.log" --seed-file="$DIR/state/munged.seed"
    slurmctld
    for ((node = 1; node <= NODES; node++)); do
      slurmd -N "$(node_name "$node")"
    done
  )
}

is_running() { [ -f "$CONF" ] && [[ $(processes) == *slurmctld* ]]; }

is_up() { # a client without a controller would try for half a minute
  is_running || return 1
  local up
  up=$(SLURM_CONF=$CONF timeout 10 sinfo --noheader --Node --partition=main --format=%t 2>/dev/null |
    grep -cxE 'alloc|comp|idle|mix|plnd') || return 1
  [ "$up" = "$(grep -c ^NodeName= "$CONF")" ]
}

has_no_processes() { # the state of the cluster goes with it, so nothing has to end in order
  local found
  found=$(processes)
  [ -n "$found" ] || return 0
  cut -d' ' -f1 <<<"$found" | xargs kill -KILL 2>/dev/null
  return 1
}

processes() { # daemons, step daemons and what jobs started, wherever it went: the environment says whose they are
  local files file process name
  mapfile -t files < <(grep -lzxF "SLURM_CONF=$CONF" /proc/[0-9]*/environ 2>/dev/null)
  for file in "${files[@]}"; do
    process=${file//[^0-9]/}
    read -r name 2>/dev/null <"/proc/$process/comm" || continue
    if [[ $name =~ ^(munged|slurmctld|slurmd|slurmstepd)$ ]] || grep -qz ^SLURM_JOB_ID= "$file" 2>/dev/null; then
      echo "$process $name"
    fi
  done
}

wait_for() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ $SECONDS -le $end ] || return 1
    sleep 0.1
  done
}

print_env() { echo "export SLURM_CONF=$CONF"; }

die() {
  echo "cluster.sh: $*" >&2
  exit 1
}

main "$@"

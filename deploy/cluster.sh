#!/usr/bin/env bash
# A whole Waybill cluster on this machine, to look at and to break.
#
#   deploy/cluster.sh up            starts it (`make cluster` builds before)
#   deploy/cluster.sh down          ends what it has started, and nothing else (`make cluster-down`)
#   deploy/cluster.sh start NAME    starts one of its parts again
#   deploy/cluster.sh kill NAME     kills one (SIGKILL); freeze and thaw stop it and let it go on
#
# Three NATS servers, Redis, Postgres, two simulated providers, an auditor, three gateways behind HAProxy, two projectors.
# Everything lies in one folder (CLUSTER, by default waybill-cluster in the folder for temporary files): files, logs, and
# for each process its id with the time of its start, so that no other process is ever taken for one of ours.
set -euo pipefail

cd "$(dirname "$0")/.."
readonly CLUSTER=${CLUSTER:-${TMPDIR:-/tmp}/waybill-cluster}
readonly WAYBILL=${WAYBILL:-$PWD/target/release/waybill}
# In the order of their start; they end in the opposite order.
readonly PARTS=(nats-0 nats-1 nats-2 redis postgres east west auditor gateway-0 gateway-1 gateway-2 projector-0
    projector-1 haproxy)
# Ports below those that systems give to outgoing connections, and above those that the tests take.
readonly FIRST_PORT=30000
readonly WAIT_SECONDS=60
export PATH="$PWD/tests/.installed/bin:/usr/sbin:$PATH"
export WAYBILL_CONFIG="$CLUSTER/waybill.yaml"

main() {
    case "${1:-}" in
        up) up ;;
        down) down ;;
        start) is_part "${2:-}" && ports && start "$2" ;;
        kill) is_part "${2:-}" && signal KILL "$2" ;;
        freeze) is_part "${2:-}" && signal STOP "$2" ;;
        thaw) is_part "${2:-}" && signal CONT "$2" ;;
        *) die "usage: deploy/cluster.sh up | down | start NAME | kill NAME | freeze NAME | thaw NAME" ;;
    esac
}

die() {
    echo "cluster.sh: $*" >&2
    exit 1
}

is_part() {
    [[ " ${PARTS[*]} " == *" ${1:-none} "* ]] || die "there is no \`${1:-}\`; there are ${PARTS[*]}"
}

up() {
    local part
    [[ ! -e $CLUSTER ]] || die "$CLUSTER is there: a cluster runs, or ran; \`make cluster-down\` ends it and removes the folder"
    [[ -x $WAYBILL ]] || die "$WAYBILL is missing: use \`make cluster\`, or name the binary with WAYBILL"
    for part in nats-server redis-server haproxy curl setsid pgrep; do
        command -v "$part" >/dev/null || die "$part is missing: run \`bash tests/install.sh cluster\`"
    done
    mkdir -p "$CLUSTER"/{run,log,nats,redis}
    trap 'echo "cluster.sh: it did not start; see $CLUSTER/log, and then \`make cluster-down\`" >&2' ERR
    choose_ports
    ports
    configure
    make_database_files
    for part in "${PARTS[@]}"; do
        echo "starting $part" >&2
        start "$part"
    done
    greet
}

down() {
    local n
    [[ -d $CLUSTER/run ]] || die "there is no cluster in $CLUSTER"
    for ((n = ${#PARTS[@]} - 1; n >= 0; n--)); do
        stop "${PARTS[n]}"
    done
    rm -rf "$CLUSTER"
    echo "the cluster is down, and $CLUSTER is gone" >&2
}

# --- processes ---------------------------------------------------------------------------------------------------------

# Runs the command that follows the part's name as a process of its own that outlives this shell.
run() {
    local part=$1 id
    shift
    setsid "$@" >>"$CLUSTER/log/$part.log" 2>&1 </dev/null &
    id=$!
    echo "$id $(start_of "$id")" >"$CLUSTER/run/$part"
}

# When process $1 started, in the system's own unit; nothing where there is none, or only what nobody has buried.
start_of() {
    sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" { print $20 }'
}

# The id of part $1; fails where it does not run.
id_of() {
    local id start
    [[ -f $CLUSTER/run/$1 ]] && read -r id start <"$CLUSTER/run/$1" && [[ -n $start && $(start_of "$id") == "$start" ]] && echo "$id"
}

signal() {
    local id child children=()
    id=$(id_of "$2") || die "$2 does not run"
    # Connections of Postgres are processes of their own.
    [[ $2 != postgres ]] || mapfile -t children < <(pgrep -P "$id")
    kill "-$1" "$id"
    # One that has ended meanwhile needs no signal.
    for child in "${children[@]}"; do kill "-$1" "$child" 2>/dev/null || true; done
    [[ $1 == KILL ]] || return 0
    has_ended "$2"
    for child in "${children[@]}"; do
        while [[ -n $(start_of "$child") ]]; do sleep 0.1; done
    done
}

stop() {
    local id ending=TERM
    id=$(id_of "$1") || return 0
    # For Postgres this is the quick way, which waits for no client.
    [[ $1 != postgres ]] || ending=INT
    kill -CONT "$id"
    kill "-$ending" "$id"
    has_ended "$1" || kill -KILL "$id"
}

has_ended() {
    local n
    for ((n = 0; n < WAIT_SECONDS * 10; n++)); do
        id_of "$1" >/dev/null || return 0
        sleep 0.1
    done
    return 1
}

# Waits until the command that follows the part's name succeeds.
await() {
    local part=$1 n
    shift
    for ((n = 0; n < WAIT_SECONDS * 10; n++)); do
        if "$@" >/dev/null 2>&1; then return 0; fi
        id_of "$part" >/dev/null || break
        sleep 0.1
    done
    tail -n 5 "$CLUSTER/log/$part.log" >&2
    die "$part is not ready"
}

answers() { curl --silent --fail --max-time 2 "http://127.0.0.1:$1$2"; }

# --- parts -------------------------------------------------------------------------------------------------------------

start() {
    local part=$1 n=${1##*-}
    if id_of "$part" >/dev/null; then die "$part runs"; fi
    case $part in
        nats-*)
            run "$part" nats-server --config "$CLUSTER/nats/$n.conf"
            # Only two of them can have a leader.
            [[ $n != 2 ]] || await "$part" answers "${PORT[nats-2-http]}" /healthz
            ;;
        redis)
            run redis redis-server --bind 127.0.0.1 --port "${PORT[redis]}" --dir "$CLUSTER/redis" --save '' \
                --appendonly yes
            await redis redis-cli -p "${PORT[redis]}" ping
            ;;
        postgres)
            # One that was killed has left it, and its number may be in use by now.
            rm -f "$CLUSTER/postgres/postmaster.pid"
            run postgres "${AS_POSTGRES[@]}" "$(postgres_binary postgres)" -D "$CLUSTER/postgres" -p "${PORT[postgres]}" \
                -c listen_addresses=127.0.0.1 -c unix_socket_directories=
            await postgres "$(postgres_binary pg_isready)" -h 127.0.0.1 -p "${PORT[postgres]}" -U waybill -d postgres
            ;;
        east | west)
            run "$part" "$WAYBILL" simulator --name "$part" --listen "127.0.0.1:${PORT[$part]}"
            await "$part" answers "${PORT[$part]}" /__calls
            ;;
        auditor)
            run auditor "$WAYBILL" auditor --listen "127.0.0.1:${PORT[auditor]}"
            await auditor answers "${PORT[auditor]}" /readyz
            ;;
        gateway-*)
            run "$part" "$WAYBILL" gateway --data "$CLUSTER/$part" --writer "$part" --listen "127.0.0.1:${PORT[$part]}"
            await "$part" answers "${PORT[$part]}" /readyz
            ;;
        projector-*)
            run "$part" "$WAYBILL" projector --listen "127.0.0.1:${PORT[$part]}"
            await "$part" answers "${PORT[$part]}" /readyz
            ;;
        haproxy)
            run haproxy env "WAYBILL_PORT=${PORT[haproxy]}" "WAYBILL_GATEWAY_0=${PORT[gateway-0]}" \
                "WAYBILL_GATEWAY_1=${PORT[gateway-1]}" "WAYBILL_GATEWAY_2=${PORT[gateway-2]}" \
                haproxy -db -f deploy/examples/haproxy.cfg
            await haproxy answers "${PORT[haproxy]}" /readyz
            ;;
    esac
}

declare -A PORT

# Finds a free port for everything that listens, and keeps them for later starts.
choose_ports() {
    local port=$FIRST_PORT name
    for name in nats-{0,1,2}{,-http,-cluster} redis postgres east west auditor gateway-{0,1,2} projector-{0,1} haproxy; do
        # Whoever answers has the port.
        while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
        echo "$name $port"
        port=$((port + 1))
    done >"$CLUSTER/ports"
}

ports() {
    local name port
    [[ -f $CLUSTER/ports ]] || die "there is no cluster in $CLUSTER"
    while read -r name port; do PORT[$name]=$port; done <"$CLUSTER/ports"
}

# Postgres refuses to run as root; its package makes a user for it.
AS_POSTGRES=()
[[ $(id -u) != 0 ]] || AS_POSTGRES=(setpriv --reuid=postgres --regid=postgres --clear-groups)

# The newest installed: Debian keeps the server's binaries out of the path.
postgres_binary() {
    local newest
    newest=$(compgen -G "/usr/lib/postgresql/*/bin/$1" | sort -V | tail -n 1)
    [[ -n $newest ]] || newest=$(command -v "$1") || die "$1 is missing: run \`bash tests/install.sh cluster\`"
    echo "$newest"
}

make_database_files() {
    mkdir "$CLUSTER/postgres"
    [[ $(id -u) != 0 ]] || chown postgres "$CLUSTER/postgres"
    # Whoever may connect to the port may do everything: this is a cluster to play with, on this machine alone.
    (cd "$CLUSTER/postgres" && "${AS_POSTGRES[@]}" "$(postgres_binary initdb)" --auth=trust --encoding=UTF8 \
        --username=waybill "$CLUSTER/postgres") >"$CLUSTER/log/initdb.log"
}

configure() {
    local n routes
    umask 077
    for n in secret key upstream; do head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$CLUSTER/$n"; done
    umask 022
    routes="nats://127.0.0.1:${PORT[nats-0-cluster]}, nats://127.0.0.1:${PORT[nats-1-cluster]}, nats://127.0.0.1:${PORT[nats-2-cluster]}"
    for n in 0 1 2; do
        cat >"$CLUSTER/nats/$n.conf" <<END
server_name: nats-$n
listen: "127.0.0.1:${PORT[nats-$n]}"
http: "127.0.0.1:${PORT[nats-$n-http]}"
# An acknowledgement means: on the disks of two servers.
jetstream { store_dir: "$CLUSTER/nats/$n", sync_interval: always }
cluster { name: waybill, listen: "127.0.0.1:${PORT[nats-$n-cluster]}", routes: [$routes] }
END
    done
    cat >"$WAYBILL_CONFIG" <<END
# The configuration of all gateways, projectors and auditors of this cluster; a changed catalogue is in force in seconds.
deployment_secret: 'file:$CLUSTER/secret'
log:
  nats: ['nats://127.0.0.1:${PORT[nats-0]}', 'nats://127.0.0.1:${PORT[nats-1]}', 'nats://127.0.0.1:${PORT[nats-2]}']
  replicas: 3
  mib_max: 256
state: { redis: 'redis://127.0.0.1:${PORT[redis]}' }
usage: { postgres: 'postgres://waybill@127.0.0.1:${PORT[postgres]}/postgres' }
notice_seconds: 2
drain_seconds: 30
health: { failure_threshold: 2, cooldown_seconds: 30 }
catalogue:
  channels:
    - { id: east, base_url: 'http://127.0.0.1:${PORT[east]}/v1', dialects: [chat, responses, messages, embeddings],
        api_keys: ['file:$CLUSTER/upstream'], models: [demo-model] }
    - { id: west, base_url: 'http://127.0.0.1:${PORT[west]}/v1', dialects: [chat, responses, messages, embeddings],
        api_keys: ['file:$CLUSTER/upstream'], models: [demo-model] }
  groups:
    - { id: demo, display_name: Demo, public_models: [demo-model] }
  routes:
    - model: demo-model
      members:
        - { channel: east, group: demo, priority: 10, weight: 100 }
        - { channel: west, group: demo, priority: 10, weight: 100 }
  keys:
    - { id: demo, key: 'file:$CLUSTER/key', group: demo, expose_route: true }
END
}

greet() {
    cat <<END

The cluster is up. A first request, by way of HAProxy to one of three gateways:

  curl -i http://127.0.0.1:${PORT[haproxy]}/v1/chat/completions -H 'authorization: Bearer $(<"$CLUSTER/key")' \\
    -H 'content-type: application/json' -H 'x-session-id: hello' \\
    -d '{"model":"demo-model","messages":[{"role":"user","content":"Hello"}]}'

X-Waybill-Deployment says who served. Repeat it: whichever gateway it meets, the session stays there. Then break something,
and repeat it again:

  deploy/cluster.sh kill gateway-0       the others serve on; \`start gateway-0\` brings it and its last facts back
  deploy/cluster.sh freeze redis         a few requests wait for 20 ms, then none does; \`thaw redis\`, and pins are shared again
  deploy/cluster.sh kill projector-0     the other one takes over
  deploy/cluster.sh kill postgres        rows wait in the log; \`start postgres\`, and they arrive
  deploy/cluster.sh kill nats-1          the other two go on

Sessions and requests, as the rows tell of them, and how far those are behind the log:

  waybill sessions --config $WAYBILL_CONFIG       then: sessions SESSION, and explain REQUEST
  psql 'postgres://waybill@127.0.0.1:${PORT[postgres]}/postgres' -c \\
    'SELECT ended, session_id, deployment, outcome, attempts FROM waybill.usage_events ORDER BY ended DESC LIMIT 10'
  curl http://127.0.0.1:${PORT[projector-0]}/metrics

The log itself (WAYBILL_CONFIG=$WAYBILL_CONFIG):

  waybill catalogue log --config $WAYBILL_CONFIG
  waybill doctor --config $WAYBILL_CONFIG --monitoring 127.0.0.1:${PORT[nats-0-http]}

Files, logs and process ids are in $CLUSTER; \`make cluster-down\` ends and removes all of it.
END
}

main "$@"

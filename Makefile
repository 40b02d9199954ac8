# What people do here. `cargo` alone is enough to build and test; these are the long ones.
.PHONY: test ci sanitize deny bench-orders large bench-kernels ladder long-context jobs passes sim policies beyond-bound backends bench-model

test:
	cargo test --workspace

ci:
	bash .ci/run

# Tests under the address sanitizer with leaks, and under the thread sanitizer: Linux on x86-64, the installed compiler, a C compiler.
sanitize:
	bash .ci/sanitize

# Licences, duplicate and banned crates, sources. Installs cargo-deny when it is missing.
deny:
	@command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny check bans licenses sources

# The two orders of summation of docs/numerics.md, section 2.
bench-orders:
	cargo run --release -p kernels --example summation_orders

# A 22 GB model with experts of real size in 2 GiB: memory, reads, page cache. LARGE_DIR needs 24 GB of room.
LARGE_DIR ?= target/large
large:
	mkdir -p $(LARGE_DIR)
	ANABRANCH_LARGE_DIR=$(abspath $(LARGE_DIR)) cargo test --release -p anabranch --test memory -- --nocapture

# Each kernel's share of its floor; raw data in bench/results.
bench-kernels:
	cargo run --release -p kernels --example bench_kernels -- bench/results/kernels-$(shell date -u +%Y%m%d-%H%M).json

# A 5.3 B model whose experts are all in memory against the machine's limits: needs 3.5 GB in MODEL_DIR and 6 GB of memory.
MODEL_DIR ?= target/k3-5b
bench-model:
	test -f $(MODEL_DIR)/config.json || cargo run --release -p anabranch -- synth --config crates/checkpoint/testdata/k3-5b-config.json --seed 1 --out $(MODEL_DIR)
	cargo run --release -p engine --example bench_model -- $(MODEL_DIR) bench/results/model-$(shell date -u +%Y%m%d-%H%M).json

# 10,000 seeds of the simulator, beyond the 300 of the tests.
SEEDS ?= 10000
sim:
	DRIVES_SIM_FIRST=300 DRIVES_SIM_SEEDS=$(SEEDS) cargo test --release -p drives --test simulation seeds -- --nocapture

# Our scheduler and four others on the same routes, in the simulator.
policies:
	cargo run --release -p drives --example policies

# What a barrier takes beyond the time of its bytes, from memory and from the drive of SCRATCH (0.6 GB).
SCRATCH ?= target
beyond-bound:
	cargo run --release -p drives --example beyond_bound -- $(SCRATCH)

# Rate and processor time of the ways to read the drive of SCRATCH (2 GB).
backends:
	cargo run --release -p drives --example backends -- $(SCRATCH)

# One to four paced drives against the sum of their speeds: needs Linux, /dev/fuse and 18 GB in LADDER_DIR. Raw data in bench/results.
LADDER_DIR ?= target/ladder
ladder:
	cargo run --release -p ladder -- --scratch $(LADDER_DIR) --out bench/results/ladder-$(shell date -u +%Y%m%d-%H%M).json

# 1,000 questions to the demo model, killed at 20 random moments and run again: the results are those of an undisturbed run.
jobs:
	JOBS_LINES=1000 JOBS_KILLS=20 cargo test --release -p anabranch --test jobs -- killed --nocapture

# A prompt of 512 tokens and batches of 1 to 64 on one paced drive, against what their reads allow: needs Linux, /dev/fuse and 5 GB in
# PASSES_DIR. Raw data in bench/results.
PASSES_DIR ?= target/passes
passes:
	cargo run --release -p ladder --bin passes -- --scratch $(PASSES_DIR) --out bench/results/passes-$(shell date -u +%Y%m%d-%H%M).json

# 200,000 tokens of context at small width: memory, time of a step, growth; and a prompt of 8,000 tokens. Raw data in bench/results.
long-context:
	for kv in f32 bf16; do cargo run --release -p engine --features testing --example long_context -- $$kv \
		bench/results/long-context-$$kv-$(shell date -u +%Y%m%d-%H%M).json || exit 1; done
	cargo test --release -p engine --test long_prompt -- --ignored --nocapture

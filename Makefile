# What people do here. `cargo` alone is enough to build and test; these are the long ones.
.PHONY: test ci deny bench-orders

test:
	cargo test --workspace

ci:
	bash .ci/run

# Licences, duplicate and banned crates, sources. Installs cargo-deny when it is missing.
deny:
	@command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
	cargo deny check bans licenses sources

# The two orders of summation of docs/numerics.md, section 2.
bench-orders:
	cargo run --release -p kernels --example summation_orders

# The tasks of a developer; `make` alone lists them. Each is one line that can be typed as well.
.PHONY: help check fast one test shard lint down

help: ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

check: ## whether everything compiles
	cargo check --locked --workspace --all-features --all-targets

fast: ## every test that needs no server
	scripts/one --fast

one: ## one test by a part of its name: make one NAME=g3_  (in one program: IN=broker_kafka)
	scripts/one $(IN) $(NAME)

test: ## everything, as before a merge; servers are started and stopped
	scripts/test

shard: ## a part of everything: make shard PART=1/3
	scripts/test --shard $(PART)

lint: ## format, clippy and documentation
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-features --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --all-features

down: ## stop the servers that `make one` left running
	scripts/services down target/services

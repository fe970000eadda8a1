# syntax=docker/dockerfile:1
# The three programs with every feature they have. Built with the compiler and on the Debian that the tests run on.

FROM rust:1.95.0-slim-bookworm AS build
# librdkafka is built by configure and make; its TLS and the kafka-tls feature use the system's OpenSSL.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ make pkg-config libssl-dev zlib1g-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo install --locked --all-features --path crates/cli --root /out

FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates libssl3 zlib1g \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10001 --home-dir /var/lib/oncebox --create-home oncebox
COPY --from=build /out/bin/oncebox /out/bin/publisher /out/bin/consumer /usr/local/bin/
COPY LICENSE-MIT LICENSE-APACHE /usr/share/doc/oncebox/
USER 10001
WORKDIR /var/lib/oncebox
CMD ["oncebox", "--help"]

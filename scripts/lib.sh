# Shared by the scripts of this folder; sourced, never run.
# shellcheck shell=bash

say() { printf '%s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# The cache of everything downloaded by these scripts; safe to delete.
# shellcheck disable=SC2034 # used by those who source this
ONCEBOX_CACHE=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/oncebox

# Installs Debian packages as root; anyone else is told what is missing.
apt_install() {
    local packages=("$@")
    [ "${#packages[@]}" -gt 0 ] || return 0
    have apt-get || die "missing and not installable here without apt-get: ${packages[*]}"
    [ "$(id -u)" -eq 0 ] || die "missing; install as root: apt-get install ${packages[*]}"
    say "installing: ${packages[*]}"
    # Servers are started by the scripts on private ports; a package must not start its default instance.
    local policy=/usr/sbin/policy-rc.d made=no rc=0
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        made=yes
    fi
    local log options=(-y --no-install-recommends -o DPkg::Lock::Timeout=300)
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    {
        apt-get install "${options[@]}" "${packages[@]}" ||
            { apt-get update && apt-get install "${options[@]}" "${packages[@]}"; }
    } >"$log" 2>&1 </dev/null || rc=$?
    if [ "$made" = yes ]; then rm -f "$policy"; fi
    if [ "$rc" -ne 0 ]; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        die "could not install: ${packages[*]}"
    fi
    rm -f "$log"
}

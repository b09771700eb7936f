#!/bin/sh
# What check_compose.py needs: root, an engine that can run a container here, debootstrap with its packages, and room for
# the images. Says what is missing; with --install gets the programs from Debian.
set -eu
cd "$(dirname "$0")/../.."
PATH="$PATH:/usr/sbin:/sbin"

if [ "$(id -u)" != 0 ]; then
    echo "not root, which an engine of its own needs" >&2
    exit 1
fi
missing=""
need() {
    command -v "$1" > /dev/null || missing="$missing $2"
}
need dockerd docker.io
need iptables iptables
need debootstrap debootstrap
if [ -n "$missing" ]; then
    if [ "${1:-}" = --install ]; then
        apt-get update -qq
        # shellcheck disable=SC2086  # a list of packages
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
    else
        echo "missing; get it with: apt-get install --no-install-recommends$missing" >&2
        exit 1
    fi
fi
PYTHONPATH=. "${PYTHON:-python3}" -m tests.containers.probe

#!/bin/sh
# What check-monitoring.sh needs: promtool, amtool, node, npm and Grafana's types. Says what is missing; with --install, as root, gets the
# programs from Debian.
set -eu
cd "$(dirname "$0")"

missing=""
need() {
    command -v "$1" > /dev/null || missing="$missing $2"
}
need promtool prometheus
need amtool prometheus-alertmanager
need node nodejs
need npm npm
if [ -n "$missing" ]; then
    if [ "${1:-}" = --install ] && [ "$(id -u)" = 0 ]; then
        apt-get update -qq
        # shellcheck disable=SC2086  # a list of packages
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
    else
        echo "missing; get it with: apt-get install --no-install-recommends$missing" >&2
        exit 1
    fi
fi
[ -d grafana/schema/node_modules ] || npm --prefix grafana/schema ci --no-audit --no-fund --silent

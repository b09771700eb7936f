#!/bin/sh
# Checks Prometheus' and Alertmanager's configuration, the rules and their tests, and the dashboards against Grafana's types.
# Needs promtool, amtool, node and npm; with CI=true and as root it installs what is missing.
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
    if [ "${CI:-}" = true ] && [ "$(id -u)" = 0 ]; then
        apt-get update -qq
        # shellcheck disable=SC2086  # a list of packages
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
    else
        echo "missing, get them with: apt-get install --no-install-recommends$missing" >&2
        exit 1
    fi
fi

# The token is a secret of the deployment, and not here.
promtool check config --syntax-only prometheus/prometheus.yml
promtool check rules --lint-fatal prometheus/rules.yml
promtool test rules prometheus/rules_test.yml
amtool check-config prometheus/alertmanager.yml
"${PYTHON:-python3}" grafana/build.py --check
npm --prefix grafana/schema ci --no-audit --no-fund --silent
npm --prefix grafana/schema run --silent check

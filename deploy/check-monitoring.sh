#!/bin/sh
# Checks Prometheus' and Alertmanager's configuration, the rules and their tests, and the dashboards against Grafana's types.
# Needs what monitoring-tools.sh names.
set -eu
cd "$(dirname "$0")"

sh monitoring-tools.sh

# The token is a secret of the deployment, and not here.
promtool check config --syntax-only prometheus/prometheus.yml
promtool check rules --lint-fatal prometheus/rules.yml
promtool test rules prometheus/rules_test.yml
amtool check-config prometheus/alertmanager.yml
"${PYTHON:-python3}" grafana/build.py --check
npm --prefix grafana/schema run --silent check

#!/usr/bin/env bash
# Starts Prometheus with the configuration of this folder on 127.0.0.1:9099, until Ctrl-C. Its data are in
# build/monitoring. LISTEN=ADDRESS:PORT sets another address; heads.yml lists the heads.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

readonly listen=${LISTEN:-127.0.0.1:9099} data=../../build/monitoring

if ! command -v prometheus >/dev/null; then
    echo "monitoring: prometheus is not installed. On Debian and Ubuntu: apt-get install prometheus" >&2
    echo "            (or take it from https://prometheus.io/download, and put it on the PATH)" >&2
    exit 1
fi
mkdir -p "$data"
cat <<END
monitoring: Prometheus is at http://$listen and scrapes the heads in examples/monitoring/heads.yml.
            Dashboards: in Grafana (https://grafana.com/grafana/download) add a data source of the kind Prometheus
            with that address, then import the files of examples/monitoring/grafana.
END
exec prometheus --config.file=prometheus.yml --storage.tsdb.path="$data" --web.listen-address="$listen" --log.level=warn

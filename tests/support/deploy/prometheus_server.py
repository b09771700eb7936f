"""A real Prometheus over targets on loopback, with the deployment's rules."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from services.cli.shared.processes import free_port

DEPLOY = Path(__file__).parents[3] / "deploy" / "prometheus"


class PrometheusServer:
    """The deployment's prometheus.yml, its targets and their token apart: here everything is on loopback."""

    def __init__(self, directory: Path, targets: dict[str, list[int]]) -> None:
        program = shutil.which("prometheus")
        assert program is not None, "prometheus is missing: apt-get install --no-install-recommends prometheus"
        self.port = free_port()
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"}
        config["rule_files"] = [str(DEPLOY / "rules.yml")]
        del config["alerting"]
        config["scrape_configs"] = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}]}
            for job, ports in targets.items()
        ]
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        arguments = [f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}"]
        arguments += [f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"]
        self._log = (directory / "prometheus.log").open("w")
        self._process = subprocess.Popen([program, *arguments], stdout=self._log, stderr=subprocess.STDOUT)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()

    def query(self, expr: str) -> list[dict[str, Any]]:
        return self._get("query", query=expr)["result"]

    def query_range(self, expr: str, seconds: float) -> list[dict[str, Any]]:
        now = time.time()
        return self._get("query_range", query=expr, start=now - seconds, end=now, step=2)["result"]

    def targets(self) -> dict[str, str]:
        """Health by address."""
        return {target["labels"]["instance"]: target["health"] for target in self._get("targets")["activeTargets"]}

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def until(self, condition: Any, what: str, timeout_seconds: float = 90) -> None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                if condition(self):
                    return
            except OSError:
                assert self._process.poll() is None, f"prometheus ended with {self._process.returncode}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_seconds} s"
            time.sleep(0.5)

    def _get(self, path: str, **parameters: Any) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

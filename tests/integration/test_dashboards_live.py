"""A live system, scraped by a real Prometheus under the deployed rules: every query of every panel has an answer."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from services.common.serving.exposition import RunLabel
from services.common.serving.gpu_metrics import GpuCollector, GpuReading
from services.trainer.metrics.step_gauges import EVALUATION_GAUGES, STEP_GAUGES, StepGauge, StepMetricCollector
from tests.support.deploy.prometheus_server import PrometheusServer
from tests.support.runs.quickstart_run import quickstart_tree
from tests.support.runs.running_system import System

ROOT = Path(__file__).parents[2]
VARIABLES = {"$run": "system", "$instance": ".*", "$__rate_interval": "20s"}

# What this run does not have: a value head, an entropy bonus, preference pairs, a calibration, and a GPU. A
# stand-in exports them by way of the same collectors, and a test says that it hides nothing that the run should have.
STAND_IN = {
    "value_loss": 0.3,
    "entropy_loss": -0.01,
    "value": 0.5,
    "return": 0.6,
    "value_clip_fraction": 0.1,
    "importance_calibration": 0.9,
    "preference_accuracy": 0.7,
    "preference_margin": 0.2,
    "preference_margin_min": -0.1,
    "preference_margin_max": 0.9,
    "chosen_reward": 0.1,
    "rejected_reward": -0.1,
}
STAND_IN_EVALUATION = {"preference_accuracy": 0.8}


class StandInGpu:
    def read(self) -> list[GpuReading]:
        return [GpuReading("0", 30, 100, 0.5)]


@dataclass
class Watched:
    system: System
    prometheus: PrometheusServer
    stand_in: str


def queries() -> Iterator[tuple[str, str, bool]]:
    """(Where it is, expression, whether over time) of every query of every panel."""
    for file in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")):
        board = json.loads(file.read_text(encoding="utf-8"))
        for top in board["panels"]:
            for panel in (top, *top.get("panels", [])):
                for target in panel.get("targets", []):
                    expr = target["expr"]
                    for name, value in VARIABLES.items():
                        expr = expr.replace(name, value)
                    yield f"{file.stem}/{panel['title']}/{target['refId']}", expr, target["range"]


QUERIES = list(queries())


@pytest.fixture(scope="module")
def watched(quickstart_model, tmp_path_factory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    tree = quickstart_tree(quickstart_model)
    tree["sampling"]["group_size"] = 4
    tree["evaluation"] = {"every": 2, "prompts": 8, "samples": 2}
    tree["trainer"] |= {"steps": 10_000, "groups_per_step": 4, "checkpoint_every": 2}
    system = System(directory, tree)
    registry = CollectorRegistry()
    for gauges, values in ((STEP_GAUGES, STAND_IN), (EVALUATION_GAUGES, STAND_IN_EVALUATION)):
        collector = StepMetricCollector(gauges)
        collector.set(values)
        registry.register(collector)
    registry.register(GpuCollector(StandInGpu()))
    stand_in, serving = start_http_server(0, "127.0.0.1", registry=RunLabel(registry, "system"))
    prometheus = None
    try:
        system.start("redis")
        system.until_redis()
        system.start("rollout", "reward", "trainer")
        ports = {name: [system.http_port(name)] for name in ("rollout", "reward", "trainer")}
        prometheus = PrometheusServer(directory, {**ports, "stand-in": [stand_in.server_port]})
        prometheus.until(lambda server: server.query('trivet_run_dead_letters_total{run="system"}'), "first scrape")
        system.until_step(3)
        system.client.xadd("system:samples", {"message": b"\xff no message"})
        step = system.run_log.steps()[-1]["step"]
        system.until_step(step + 4)
        prometheus.until(
            lambda server: server.query('trivet_dead_letters_total{code="entry_unparsable"} > 0'), "counted dead letter"
        )
        # A rate takes two scrapes, and steps may come faster than those.
        trained = 'count_over_time(trivet_rollout_groups_total{run="system", purpose="train"}[10m]) >= 4'
        prometheus.until(lambda server: server.query(trained), "four scrapes of a rollout that samples for training")
        yield Watched(system, prometheus, f"127.0.0.1:{stand_in.server_port}")
    finally:
        stand_in.shutdown()
        stand_in.server_close()
        serving.join(5)
        if prometheus is not None:
            prometheus.stop()
        system.stop()


def test_every_target_is_up(watched):
    watched.prometheus.until(lambda server: set(server.targets().values()) == {"up"}, "targets that are all up", 30)
    assert len(watched.prometheus.targets()) == 4


@pytest.mark.parametrize(("expr", "over_time"), [each[1:] for each in QUERIES], ids=[each[0] for each in QUERIES])
def test_every_query_has_an_answer(watched, expr, over_time):
    if over_time:
        found = [value for series in watched.prometheus.query_range(expr, 60) for _, value in series["values"]]
    else:
        found = [series["value"][1] for series in watched.prometheus.query(expr)]
    assert any(math.isfinite(float(value)) for value in found), f"no answer to {expr}"


def test_the_stand_in_hides_nothing_that_the_run_has(watched):
    names = {StepGauge.family(gauge).name for gauge in (*STEP_GAUGES, *EVALUATION_GAUGES)}
    ours = {
        series["metric"]["__name__"]
        for series in watched.prometheus.query(f'{{instance="{watched.stand_in}", __name__=~"trivet_trainer_.*"}}')
    }
    real = {
        series["metric"]["__name__"]
        for series in watched.prometheus.query(f'{{instance!="{watched.stand_in}", __name__=~"trivet_trainer_.*"}}')
    }
    assert ours <= names
    assert ours & real == set()


def test_every_series_names_the_run(watched):
    nameless = watched.prometheus.query('count by (__name__) ({__name__=~"trivet_.+|process_.+", run!="system"})')
    assert nameless == []


def test_values_are_those_of_the_records(watched):
    (step,) = watched.prometheus.query('trivet_trainer_step{run="system"}')
    (ratio,) = watched.prometheus.query('trivet_trainer_sampler_ratio_mean{run="system"}')
    recorded = {entry["metrics"]["sampler_ratio_mean"] for entry in watched.system.run_log.steps()}
    assert float(ratio["value"][1]) in recorded
    assert 1 <= float(step["value"][1]) <= watched.system.run_log.steps()[-1]["step"]


def test_the_rules_are_evaluated_and_the_dead_letter_fires(watched):
    rules = watched.prometheus.rules()
    assert [rule["name"] for rule in rules if rule["health"] == "err"] == []
    alert = 'ALERTS{alertname="TrivetDeadLetters", alertstate="firing", run="system"}'
    watched.prometheus.until(lambda server: server.query(alert), "alert about the dead letter", 30)


def test_labels_stay_few(watched):
    """No series for each step, prompt or sample."""
    counts = watched.prometheus.query('count by (__name__, instance) ({__name__=~"trivet_.+", __name__!~".+_bucket"})')
    assert max(float(each["value"][1]) for each in counts) <= 16

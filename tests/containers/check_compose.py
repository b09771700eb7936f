"""The Compose deployment with its CPU override on a real engine: `make containers-check`. In this order: a story."""

import json
import os
import signal

import pytest

from tests.containers.deployment import ROOT, RUN, SERVICES, Deployment

# The first one waits for all images.
pytestmark = pytest.mark.timeout(2400)

START_SECONDS, RECOVER_SECONDS, TRAIN_SECONDS = 300, 240, 600
# Enough for the quickstart's accuracy.
STEPS = 60
# No GPU, no value head, no preference pairs, and neither a calibration nor an entropy bonus is configured.
NOT_IN_THIS_RUN = (
    "trivet_gpu_",
    "_preference_",
    "trivet_trainer_value",
    "trivet_trainer_return",
    "trivet_trainer_entropy_loss",
    "trivet_trainer_chosen_reward",
    "trivet_trainer_rejected_reward",
    "trivet_trainer_importance_calibration",
)


def test_everything_comes_up_healthy(deployment: Deployment) -> None:
    deployment.up(*SERVICES)
    for service in SERVICES:
        deployment.until(lambda service=service: deployment.healthy(service), f"healthy {service}", START_SECONDS)
    prepared = deployment.containers("prepare")[0]["State"]
    assert (prepared["Running"], prepared["ExitCode"]) == (False, 0)


@pytest.mark.parametrize("service", SERVICES)
def test_containers_have_no_more_rights_than_they_need(deployment: Deployment, service: str) -> None:
    assert deployment.run_in(service, "id", "-u").stdout.strip() != "0"
    status = deployment.run_in(service, "cat", "/proc/1/status").stdout
    capabilities = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("Cap", "NoNewPrivs")))
    assert int(capabilities["CapBnd"], 16) == 0
    assert capabilities["NoNewPrivs"] == "1"
    refused = deployment.run_in(service, "touch", "/srv/here", check=False)
    assert "Read-only file system" in refused.stderr


def test_services_reach_no_further_than_they_should(deployment: Deployment) -> None:
    """Redis is on a network of its own with the services; Prometheus is not on it, and without a token sees nothing."""
    assert "unable to resolve host address" in _wget(deployment, "prometheus", "http://redis:6379/")
    assert "401 Unauthorized" in _wget(deployment, "prometheus", "http://trainer:8080/metrics")


def test_prometheus_scrapes_every_service(deployment: Deployment) -> None:
    expected = {"rollout": 1, "reward": 1, "trainer": 1, "prometheus": 1, "alertmanager": 1}
    deployment.until(lambda: _targets_up(deployment) == expected, f"targets {expected}", 60)


def test_rollouts_scale_to_two(deployment: Deployment) -> None:
    deployment.up("--no-recreate", "--scale", "rollout=2", *SERVICES)
    deployment.until(lambda: deployment.healthy("rollout", 2), "two healthy rollouts", START_SECONDS)
    deployment.until(lambda: _targets_up(deployment)["rollout"] == 2, "two scraped rollouts", 60)
    deployment.until(lambda: len(_samplers(deployment)) >= 2, "samples of both rollouts", TRAIN_SECONDS)


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_container_comes_back(deployment: Deployment, service: str) -> None:
    """A crash of its first process; `docker kill` would count as a stop by hand, which the engine leaves stopped."""
    before = deployment.containers(service)
    victim = before[0]
    assert deployment.containers("trainer")[0]["State"]["Running"]
    os.kill(victim["State"]["Pid"], signal.SIGKILL)

    def restarted() -> bool:
        now = {container["Id"]: container for container in deployment.containers(service)}
        return now[victim["Id"]]["RestartCount"] > victim["RestartCount"] and deployment.healthy(service, len(before))

    deployment.until(restarted, f"{service} that is healthy again", RECOVER_SECONDS)
    reached = deployment.step()
    deployment.until(lambda: deployment.step() > reached, f"step after {reached}", RECOVER_SECONDS)


def test_every_panel_has_data(deployment: Deployment) -> None:
    """Grafana itself is not here: its dashboards' expressions are asked of the deployment's Prometheus."""
    expressions = [each for each in _panel_expressions() if not any(name in each for name in NOT_IN_THIS_RUN)]
    assert len(expressions) > 50

    def all_answered() -> bool:
        return all(deployment.query(expression) for expression in expressions)

    deployment.until(all_answered, "data for every panel", RECOVER_SECONDS)


def test_a_new_setting_ends_the_training(deployment: Deployment) -> None:
    """The trainer stops with a checkpoint, resumes from it, and ends with 0."""
    deployment.until(lambda: deployment.step() >= STEPS, f"step {STEPS}", TRAIN_SECONDS)
    steps = deployment.step() + 10
    deployment.set(TRIVET__TRAINER__STEPS=str(steps))
    deployment.up("--scale", "rollout=2", *SERVICES)

    def finished() -> bool:
        state = deployment.containers("trainer")[0]["State"]
        return not state["Running"] and state["ExitCode"] == 0

    deployment.until(finished, "end of the training", TRAIN_SECONDS)
    trained = {record["step"] for record in deployment.records("steps.jsonl")}
    assert trained >= set(range(1, max(steps, *trained) + 1))
    evaluations = deployment.records("evaluations.jsonl")
    first, last = evaluations[0]["metrics"], evaluations[-1]["metrics"]
    assert first["sampled_accuracy"] < 0.45, first
    assert last["sampled_accuracy"] > 0.65, last


def test_another_up_finds_nothing_to_do(deployment: Deployment) -> None:
    before = deployment.records("steps.jsonl")
    ended_at = deployment.containers("trainer")[0]["State"]["FinishedAt"]
    deployment.up("--scale", "rollout=2", *SERVICES)

    def ended_again() -> bool:
        state = deployment.containers("trainer")[0]["State"]
        return not state["Running"] and state["FinishedAt"] != ended_at

    deployment.until(ended_again, "end of the trainer", START_SECONDS)
    assert deployment.containers("trainer")[0]["State"]["ExitCode"] == 0
    assert deployment.records("steps.jsonl") == before


def _wget(deployment: Deployment, service: str, address: str) -> str:
    return deployment.run_in(service, "wget", "-T", "5", "-t", "1", "-O", "/dev/null", address, check=False).stderr


def _targets_up(deployment: Deployment) -> dict[str, int]:
    return {row["metric"]["job"]: int(row["value"][1]) for row in deployment.query("sum by (job) (up)") if row["value"]}


def _samplers(deployment: Deployment) -> list[str]:
    rows = deployment.query('sum by (instance) (trivet_rollout_samples_total{job="rollout"}) > 0')
    return [row["metric"]["instance"] for row in rows]


def _panel_expressions() -> list[str]:
    found = []
    for path in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        panels = [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", []))]
        found += [target["expr"] for panel in panels for target in panel.get("targets", [])]
    # What Grafana would put for the choices "All" and for the interval of the picture.
    chosen = (("$__rate_interval", "1m"), ("$run", RUN), ("$instance", ".+"))
    for name, value in chosen:
        found = [expression.replace(name, value) for expression in found]
    return sorted(set(found))

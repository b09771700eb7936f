"""The chart lints, renders and validates; what cannot work is refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from jsonschema import ValidationError as JsonSchemaError
from pydantic import ValidationError

from services.common.config import load_config
from tests.support.deploy import chart_engine as engine
from tests.support.deploy.chart_engine import CHART, KUBERNETES, PRESETS, ROOT, preset, render

VARIANTS = {
    "keda for both, not to zero": (
        "single-node",
        "rollout.autoscaling={kind: keda, minReplicas: 1, maxReplicas: 2}",
        "reward.autoscaling={kind: keda, minReplicas: 0, groupsPerReplica: 7}",
    ),
    "hpa for both": ("single-node", "rollout.autoscaling.kind=hpa", "reward.autoscaling.kind=hpa"),
    "a Redis elsewhere": (
        "multi-node",
        "redis={enabled: false, external: {address: 'redis.example:6380', port: 6380, cidrs: [10.1.2.0/24], tls: true, "
        "username: trivet}}",
        "secrets.existingSecret=trivet-secrets",
    ),
    "several ranks on one node": ("single-node", "trainer.gpusPerNode=4"),
    "ranks without accelerators on three nodes": (
        "cpu",
        "singleNode=false",
        "trainer.nodes=3",
        "trainer.processesPerNode=2",
        "storage.runs.accessMode=ReadWriteMany",
        "storage.inputs.accessMode=ReadWriteMany",
    ),
    "no network policies, no budgets": (
        "single-node",
        "networkPolicy.enabled=false",
        *(f"{each}.podDisruptionBudget.enabled=false" for each in ("rollout", "reward", "trainer", "redis")),
    ),
    "placement, names and further volumes": (
        "multi-node",
        "fullnameOverride=grpo",
        "imagePullSecrets=[{name: registry}]",
        "extensions.configMap=scorers",
        "config.weights={transfer: nccl}",
        "networkPolicy.clients=[{podSelector: {matchLabels: {role: operator}}}]",
        "networkPolicy.extraEgress.trainer=[{to: [{ipBlock: {cidr: 10.9.0.0/16}}], ports: [{port: 443}]}]",
        "trainer.jobLabels={kueue.x-k8s.io/queue-name: gpus}",
        "trainer.suspend=true",
        "trainer.nodeSelector={accelerator: h100}",
        "trainer.affinity={nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: "
        "[{matchExpressions: [{key: zone, operator: In, values: [a]}]}]}}}",
        "rollout.env={VLLM_LOGGING_LEVEL: INFO, HF_HUB_OFFLINE: '0'}",
        "rollout.envFrom=[{secretRef: {name: hub}}]",
        "rollout.extraVolumes=[{name: scratch, emptyDir: {}}]",
        "rollout.extraVolumeMounts=[{name: scratch, mountPath: /scratch}]",
        "rollout.runtimeClassName=nvidia",
        "reward.priorityClassName=low",
        "reward.podLabels={team: rl}",
        "reward.podAnnotations={note: x}",
        "rollout.image={repository: r/rollout, digest: 'sha256:" + 64 * "a" + "'}",
        "redis.storage.storageClass=fast",
    ),
}

IMPOSSIBLE = {
    "config={}": "config is empty: it takes the run's YAML",
    "config.redis={url: 'redis://other:6379/0'}": "config.redis.url is set, expected nothing",
    "config.run.directory=/elsewhere": "config.run.directory is /elsewhere, expected runs",
    "config.reward.server={http_port: 1}": "config.reward.server is set, expected nothing",
    "singleNode=true": "trainer.nodes is 2 while singleNode is true",
    "storage.runs.accessMode=ReadWriteOnce": "storage.runs.accessMode is ReadWriteOnce, expected ReadWriteMany",
    "storage.inputs.accessMode=ReadWriteOnce": "storage.inputs.accessMode is ReadWriteOnce, expected ReadWriteMany or",
    "storage.inputs.enabled=false": "config.model.path is models/Qwen3-30B-A3B while storage.inputs.enabled is false",
    "config.model.path=Qwen/Qwen3-30B-A3B": "a hub id, and the network policies let nothing out",
    "config.weights={transfer: ipc}": "config.weights.transfer is ipc, expected disk or nccl",
    "config.model.path=/mnt/model": "config.model.path is /mnt/model, expected a directory under models/",
    "config.blobs.url=file:///tmp/blobs": "config.blobs.url is file:///tmp/blobs, expected a directory under",
    "config.prepare={command: [x], creates: made/x}": "config.prepare.creates is made/x, expected a path under",
    "config.prepare={command: [x], creates: models/x}": "expected storage.inputs.enabled and an access mode",
    "trainer.gpusPerNode=0": "config.trainer.device is cuda while trainer.gpusPerNode is 0",
    "config.trainer.device=cpu": "config.trainer.device is cpu while trainer.gpusPerNode is 8",
    "trainer.processesPerNode=9": "trainer.processesPerNode is 9, expected at most trainer.gpusPerNode (8)",
    "rollout.gpus=4": "rollout.gpus is 4, expected 2: config.rollout.engine's tensor_parallel_size",
    "rollout.autoscaling={kind: keda, minReplicas: 3, maxReplicas: 2}": "minReplicas is 3, expected at most max",
    "rollout.autoscaling.kind=hpa": "rollout.autoscaling.minReplicas is 0 with kind hpa, expected at least 1",
    "reward.autoscaling={kind: hpa, minReplicas: 1, metrics: []}": "reward.autoscaling.metrics is empty",
    "config.trainer.batch_timeout_seconds=2400": "expected less than config.trainer.batch_timeout_seconds (2400)",
    "config.evaluation.timeout_seconds=600": "expected less than config.evaluation.timeout_seconds (600)",
    "redis.enabled=false": "redis.enabled is false and secrets.existingSecret is empty",
}

UNKNOWN = {
    "rolout={}": "rolout",
    "rollout.replica=2": "replica",
    "rollout.replicas=-1": "replicas",
    "rollout.replicas='2'": "replicas",
    "rollout.autoscaling.kind=both": "kind",
    "rollout.image={repository: x, pullPolicy: Sometimes}": "pullPolicy",
    "rollout.resources.limits.memory=lots": "memory",
    "rollout.tolerations=[{effect: Never}]": "effect",
    "rollout.env={lower-case: x}": "lower-case",
    "trainer.nodes=0": "nodes",
    "storage.runs.accessMode=ReadOnlyMany": "accessMode",
    "redis.external.address=redis://host:6379": "address",
    "networkPolicy.clients=[{}]": "clients",
    "networkPolicy.clients=[{ipBlock: {}}]": "ipBlock",
    "monitoring.serviceMonitors.interval=often": "interval",
    "config.trainer.stepz=3": "stepz",
    "config.sampling.temperature=0": "temperature",
    "config.algorithm.clip_low=2": "clip_low",
    "config.run.name=Upper_Case": "name",
}


def values_of(variant: str) -> dict[str, Any]:
    name, *changes = VARIANTS[variant]
    return preset(name, *changes)


@pytest.mark.parametrize("kube_version", KUBERNETES)
@pytest.mark.parametrize("name", PRESETS)
def test_presets_lint_without_a_warning(name: str, kube_version: str) -> None:
    report = helm.lint(CHART, preset(name), strict=True, kube_version=f"v{kube_version}.0")

    assert report["total_charts_linted"] == 1
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert report["errors"] == []


def test_the_chart_alone_lints_and_asks_for_a_config() -> None:
    assert helm.lint(CHART, strict=True)["errors"] == []
    with pytest.raises(helm.HelmRenderError, match="config is empty"):
        render({})


@pytest.mark.parametrize("change", UNKNOWN)
def test_values_are_held_to_the_schema(change: str) -> None:
    values = preset("multi-node", change)

    with pytest.raises(helm.HelmValuesError, match=UNKNOWN[change]):
        engine.chart().validate_schema(values)
    with pytest.raises(helm.HelmError):
        render(values)


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_what_cannot_work_is_refused_with_a_sentence(change: str) -> None:
    with pytest.raises(helm.HelmRenderError) as caught:
        render(preset("multi-node", change))

    assert IMPOSSIBLE[change] in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["redis={enabled: false, external: {address: 'h:1'}}"], "redis.external.cidrs is empty"),
        (["redis={enabled: false, external: {cidrs: [10.0.0.0/8]}}"], "redis.external.address is empty"),
    ],
)
def test_a_redis_elsewhere_has_to_be_reachable(changes: list[str], sentence: str) -> None:
    with pytest.raises(helm.HelmRenderError) as caught:
        render(preset("multi-node", "secrets.existingSecret=mine", *changes))

    assert sentence in str(caught.value)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", PRESETS)
def test_presets_validate_strictly(name: str, version: str) -> None:
    for document in render(preset(name)):
        engine.check(document, version)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_validate_strictly(variant: str) -> None:
    documents = render(values_of(variant))

    for document in documents:
        engine.check(document, KUBERNETES[-1])
    keys = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("kind", ["Deployment", "NetworkPolicy", "Job", "ScaledObject", "ServiceMonitor"])
def test_the_validation_notices_an_unknown_field(kind: str) -> None:
    document = engine.kinds(render(preset("multi-node")), kind)[0]
    document["spec"]["surprise"] = True

    with pytest.raises((JsonSchemaError, ValidationError)):
        engine.check(document, KUBERNETES[-1])


def test_the_schema_holds_the_configuration_as_it_is_now() -> None:
    namespace: dict[str, Any] = {"__file__": str(CHART.parent / "values_schema.py"), "__name__": "values_schema"}
    exec((CHART.parent / "values_schema.py").read_text(encoding="utf-8"), namespace)
    committed = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    assert committed == namespace["with_config"](committed), "run: python deploy/k8s/values_schema.py"


def test_every_default_is_allowed_and_every_value_has_a_default() -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    properties = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]

    engine.chart().validate_schema(defaults)
    # `global` is Helm's own.
    assert defaults.keys() == properties.keys() - {"global"}
    for section, schema in properties.items():
        if schema.get("additionalProperties") is False:
            assert schema["properties"].keys() == defaults[section].keys(), section


@pytest.mark.parametrize("name", PRESETS)
def test_the_config_map_loads_as_a_configuration(name: str, tmp_path: Path) -> None:
    data = engine.named(render(preset(name)), "ConfigMap", "demo-trivet-config")["data"]
    file = tmp_path / "trivet.yaml"
    file.write_text(data["trivet.yaml"])

    assert load_config(file, environment={}).dump() == load_config(_written(preset(name), tmp_path)).dump()


def _written(values: dict[str, Any], folder: Path) -> Path:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values["config"]))
    return file


def test_the_cpu_preset_is_the_quickstart() -> None:
    quickstart = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))

    assert preset("cpu")["config"] == quickstart


def test_rules_dashboards_and_redis_settings_are_those_of_deploy() -> None:
    documents = render(preset("multi-node"))
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text(encoding="utf-8"))
    boards = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))

    assert engine.named(documents, "PrometheusRule", "demo-trivet")["spec"] == rules
    assert rules["groups"]
    assert boards
    for board in boards:
        shipped = engine.named(documents, "ConfigMap", f"demo-trivet-dashboard-{board.stem}")
        assert shipped["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(shipped["data"][board.name]) == json.loads(board.read_text(encoding="utf-8"))
    redis = engine.named(documents, "ConfigMap", "demo-trivet-redis")["data"]["redis.conf"]
    assert redis.strip() == (ROOT / "deploy/redis/redis.conf").read_text(encoding="utf-8").strip()


def test_the_packaged_chart_holds_what_its_links_lead_to(tmp_path: Path) -> None:
    values = preset("multi-node", "secrets.existingSecret=mine")
    packed = helm.Chart.load(helm.package(CHART, destination=tmp_path))

    linked = engine.chart().render(values, name="demo", namespace="rl")
    assert packed.render(values, name="demo", namespace="rl") == linked


def test_a_change_of_the_configuration_rolls_the_pods_and_nothing_else_does() -> None:
    def checksums(*changes: str) -> dict[str, str]:
        templates = engine.pod_templates(render(preset("cpu", *changes)))
        return {each: templates[each]["metadata"]["annotations"]["checksum/config"] for each in engine.SERVICES}

    before = checksums()
    assert checksums("rollout.replicas=3") == before
    assert all(checksums("config.sampling.max_tokens=8")[each] != before[each] for each in before)

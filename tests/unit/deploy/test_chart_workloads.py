"""What the chart's pods may do, how they scale, start and end."""

from typing import Any

import pytest
import yaml

from services.common.exit_codes import NEVER_RESTARTED
from tests.support.deploy import chart_engine as engine
from tests.support.deploy.chart_engine import PRESETS, SERVICES, Document, preset, render

NAMES = {"rollout": "demo-trivet-rollout", "reward": "demo-trivet-reward", "trainer": "demo-trivet-trainer"}


def component(labels: dict[str, str]) -> str:
    return labels["app.kubernetes.io/component"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_pod_meets_the_restricted_standard(name: str) -> None:
    for pod in engine.pod_templates(render(preset(name))).values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec["automountServiceAccountToken"]
        for each in spec["containers"] + spec.get("initContainers", []):
            context = each["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in each["resources"]["limits"]


@pytest.mark.parametrize("name", PRESETS)
def test_service_accounts_have_no_rights_and_one_exists_for_each_pod(name: str) -> None:
    documents = render(preset(name))
    accounts = {each["metadata"]["name"]: each for each in engine.kinds(documents, "ServiceAccount")}

    used = {pod["spec"]["serviceAccountName"] for pod in engine.pod_templates(documents).values()}
    assert used == accounts.keys()
    assert not any(each["automountServiceAccountToken"] for each in accounts.values())
    assert not any("Role" in each["kind"] for each in documents)


@pytest.mark.parametrize("name", PRESETS)
def test_every_volume_that_is_mounted_exists(name: str) -> None:
    documents = render(preset(name))
    claims = {each["metadata"]["name"] for each in engine.kinds(documents, "PersistentVolumeClaim")} | {"trivet-inputs"}
    maps = {each["metadata"]["name"] for each in engine.kinds(documents, "ConfigMap")}
    for document in documents:
        for pod in engine.pod_templates([document]).values():
            volumes = {each["name"]: each for each in pod["spec"].get("volumes", [])}
            made = {each["metadata"]["name"] for each in document["spec"].get("volumeClaimTemplates", [])}
            for each in pod["spec"]["containers"] + pod["spec"].get("initContainers", []):
                assert {mount["name"] for mount in each["volumeMounts"]} <= volumes.keys() | made
            for volume in volumes.values():
                assert volume.get("persistentVolumeClaim", {"claimName": "trivet-inputs"})["claimName"] in claims
                assert volume.get("configMap", {"name": "demo-trivet-config"})["name"] in maps


def mounts(documents: list[Document], name: str) -> dict[str, bool]:
    """Path to whether it can be written."""
    return {
        each["mountPath"]: not each.get("readOnly", False) for each in engine.container(documents, name)["volumeMounts"]
    }


def test_only_the_trainer_writes_runs_and_nobody_the_inputs() -> None:
    documents = render(preset("cpu"))

    assert mounts(documents, "trainer")["/srv/trivet/runs"]
    assert not mounts(documents, "rollout")["/srv/trivet/runs"]
    assert "/srv/trivet/runs" not in mounts(documents, "reward")
    for each in ("trainer", "rollout"):
        assert not mounts(documents, each)["/srv/trivet/models"]
    assert mounts(documents, "prepare")["/srv/trivet/models"]


def test_rollouts_write_where_blobs_or_a_hub_model_go() -> None:
    on_volume = render(preset("cpu", "config.blobs={url: 'file:///srv/trivet/runs/blobs'}"))
    from_hub = render(preset("single-node"))

    assert mounts(on_volume, "rollout")["/srv/trivet/runs"]
    assert mounts(from_hub, "rollout")["/srv/trivet/models"]
    environment = {each["name"]: each.get("value") for each in engine.container(from_hub, "rollout")["env"]}
    assert environment["HF_HOME"] == "/srv/trivet/models/huggingface"
    assert "HF_HUB_OFFLINE" not in environment


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_sees_only_its_own_token(service: str) -> None:
    pod = engine.pod_templates(render(preset("multi-node")))[service]

    secrets = [each["secret"] for each in pod["spec"]["volumes"] if "secret" in each]
    assert [[item["key"] for item in each["items"]] for each in secrets] == [["redis-url", f"{service}-token"]]


def test_the_generated_secret_fits_the_services_and_redis() -> None:
    secret = engine.named(render(preset("cpu")), "Secret", "demo-trivet")["stringData"]

    assert secret["redis-url"] == f"redis://:{secret['redis-password']}@demo-trivet-redis.rl.svc:6379/0"
    tokens = [secret[f"{each}-token"] for each in SERVICES]
    assert len({*tokens, secret["redis-password"]}) == 4
    assert all(len(each) == 32 for each in tokens)
    assert engine.kinds(render(preset("cpu", "secrets.existingSecret=mine")), "Secret") == []


@pytest.mark.parametrize("service", ["rollout", "reward"])
def test_keda_scales_on_the_length_of_the_service_s_stream(service: str) -> None:
    documents = render(preset("multi-node"))
    scaled = engine.named(documents, "ScaledObject", NAMES[service])["spec"]

    stream = {"rollout": "qwen3-30b-a3b:prompts", "reward": "qwen3-30b-a3b:samples"}[service]
    groups = {"rollout": "32", "reward": "64"}[service]
    assert scaled["scaleTargetRef"] == {"name": NAMES[service]}
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 16)
    assert [each["metadata"] for each in scaled["triggers"]] == [
        {"address": "demo-trivet-redis.rl.svc:6379", "stream": stream, "streamLength": groups}
    ]
    authentication = engine.named(documents, "TriggerAuthentication", "demo-trivet-redis")["spec"]
    assert authentication["secretTargetRef"] == [
        {"parameter": "password", "name": "demo-trivet", "key": "redis-password"}
    ]
    assert "replicas" not in engine.named(documents, "Deployment", NAMES[service])["spec"]


def test_the_streams_that_keda_reads_are_the_services_own(redis_client: Any, redis_config: Any) -> None:
    from services.common.transport.streams import RunStreams

    streams = RunStreams(redis_client, "qwen3-30b-a3b", redis_config)
    documents = render(preset("multi-node"))
    for service, stream in (("rollout", streams.prompts("c")), ("reward", streams.samples("c"))):
        trigger = engine.named(documents, "ScaledObject", NAMES[service])["spec"]["triggers"][0]
        assert trigger["metadata"]["stream"] == stream.name


@pytest.mark.parametrize("kind", ["none", "hpa", "keda"])
@pytest.mark.parametrize("service", ["rollout", "reward"])
def test_one_thing_alone_decides_how_many_there_are(service: str, kind: str) -> None:
    values = preset("single-node", f"{service}.autoscaling={{kind: {kind}, minReplicas: 1, maxReplicas: 4}}")
    documents = render(values)

    deciding = [each["kind"] for each in documents if each["kind"] in {"ScaledObject", "HorizontalPodAutoscaler"}]
    if "replicas" in engine.named(documents, "Deployment", NAMES[service])["spec"]:
        deciding.append("none")
    assert deciding == [{"none": "none", "hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[kind]]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("service", SERVICES)
def test_a_model_that_loads_for_long_is_not_killed_before_its_budget(name: str, service: str) -> None:
    values = engine.chart().merge_values(preset(name))
    probe = engine.container(render(preset(name)), service)["startupProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] >= values[service]["startSeconds"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_pod_gets_longer_than_its_drain(name: str) -> None:
    values = engine.chart().merge_values(preset(name))
    grace = {
        each: pod["spec"]["terminationGracePeriodSeconds"]
        for each, pod in engine.pod_templates(render(preset(name))).items()
        if each in SERVICES
    }

    # A rollout stops within five seconds once it is drained, a reward service within four and a half.
    assert grace["rollout"] >= values["rollout"]["drainSeconds"] + 10
    assert grace["reward"] >= values["reward"]["drainSeconds"] + 10
    stops = 2 if values["trainer"]["nodes"] > 1 else 1
    assert grace["trainer"] > stops * values["trainer"]["stopSeconds"]


def test_the_trainer_is_an_indexed_job_that_never_runs_twice() -> None:
    documents = render(preset("multi-node"))
    job = engine.named(documents, "Job", NAMES["trainer"])["spec"]

    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    assert job["podReplacementPolicy"] == "Failed"
    assert job["maxFailedIndexes"] == 0
    failing = [rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert failing == [sorted(NEVER_RESTARTED)]
    nodes = engine.named(documents, "Service", job["template"]["spec"]["subdomain"])["spec"]
    assert nodes["clusterIP"] == "None"
    assert nodes["publishNotReadyAddresses"]
    assert nodes["selector"].items() <= job["template"]["metadata"]["labels"].items()
    api = engine.named(documents, "Service", NAMES["trainer"])["spec"]["selector"]
    assert api["batch.kubernetes.io/job-completion-index"] == "0"


def test_accelerators_are_asked_for_where_the_values_say_so() -> None:
    limits = {
        name: [
            engine.container(render(preset(name)), each)["resources"]["limits"].get("nvidia.com/gpu")
            for each in SERVICES
        ]
        for name in PRESETS
    }

    assert limits == {"cpu": [None] * 3, "single-node": [1, None, 1], "multi-node": [2, None, 8]}


def test_on_a_single_node_all_pods_go_where_the_first_one_is() -> None:
    for pod in engine.pod_templates(render(preset("single-node"))).values():
        (term,) = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert "topologySpreadConstraints" not in pod["spec"]


@pytest.mark.parametrize("service", ["rollout", "trainer"])
def test_on_several_nodes_pods_spread(service: str) -> None:
    pod = engine.pod_templates(render(preset("multi-node")))[service]

    (constraint,) = pod["spec"]["topologySpreadConstraints"]
    assert component(constraint["labelSelector"]["matchLabels"]) == service
    assert constraint["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_disruption_budgets_select_the_pods_and_spare_redis() -> None:
    documents = render(preset("multi-node"))
    budgets = {
        component(each["metadata"]["labels"]): each["spec"] for each in engine.kinds(documents, "PodDisruptionBudget")
    }

    for each, spec in budgets.items():
        assert (
            spec["selector"]["matchLabels"].items()
            <= engine.pod_templates(documents)[each]["metadata"]["labels"].items()
        )
    assert budgets["redis"]["maxUnavailable"] == 0
    assert budgets["trainer"]["minAvailable"] == 1


@pytest.mark.parametrize("service", SERVICES)
def test_prometheus_finds_each_service_and_shows_its_token(service: str) -> None:
    documents = render(preset("multi-node"))
    monitor = engine.named(documents, "ServiceMonitor", NAMES[service])["spec"]
    services = [
        each
        for each in engine.kinds(documents, "Service")
        if monitor["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ]

    assert [each["metadata"]["name"] for each in services] == [NAMES[service]]
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in [each["name"] for each in services[0]["spec"]["ports"]]
    assert endpoint["authorization"]["credentials"] == {"name": "demo-trivet", "key": f"{service}-token"}
    # The rules and dashboards go by the job's name.
    assert services[0]["metadata"]["labels"][monitor["jobLabel"]] == service


@pytest.mark.parametrize("service", SERVICES)
def test_services_lead_to_named_ports_of_their_pods(service: str) -> None:
    documents = render(preset("cpu"))
    spec = engine.named(documents, "Service", NAMES[service])["spec"]
    ports = {each["name"]: each["containerPort"] for each in engine.container(documents, service)["ports"]}

    assert {each["targetPort"]: each["port"] for each in spec["ports"]}.items() <= ports.items()
    # Server-side apply of older servers knows no default for this key of the list.
    assert {each["protocol"] for each in spec["ports"]} == {"TCP"}


def test_a_run_that_learns_from_pairs_has_the_trainer_alone() -> None:
    config = yaml.safe_load((engine.ROOT / "configs" / "quickstart-dpo.yaml").read_text(encoding="utf-8"))
    documents = render({**preset("cpu"), "config": config, "monitoring": {"serviceMonitors": {"enabled": True}}})

    for document in documents:
        engine.check(document, engine.KUBERNETES[-1])
    assert engine.pod_templates(documents).keys() == {"trainer", "prepare"}
    assert [each["metadata"]["name"] for each in engine.kinds(documents, "ServiceMonitor")] == [NAMES["trainer"]]
    policy = engine.named(documents, "NetworkPolicy", NAMES["trainer"])["spec"]
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [53, 53]

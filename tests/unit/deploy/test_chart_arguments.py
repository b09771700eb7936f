"""What the chart renders as arguments, environment and files, read by the services' own command line and torchrun's."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.common.config import Config
from services.common.serving.arguments import parse_service_arguments
from tests.support.deploy import chart_engine as engine
from tests.support.deploy.chart_engine import PRESETS, SERVICES, Document, preset, render

CONTAINER_PATHS = "/etc/trivet"
CPU_ON_THREE_NODES = (
    "singleNode=false",
    "trainer.nodes=3",
    "trainer.processesPerNode=2",
    "storage.runs.accessMode=ReadWriteMany",
    "storage.inputs.accessMode=ReadWriteMany",
)


class Mounted:
    """A pod's ConfigMaps and Secrets as files below `root`, and its environment to match."""

    def __init__(self, documents: list[Document], component: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self.container = engine.container(documents, component)
        pod = engine.pod_templates(documents)[component]["spec"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        for mount in self.container["volumeMounts"]:
            if mount["mountPath"].startswith(CONTAINER_PATHS):
                self._write(documents, volumes[mount["name"]], root / mount["mountPath"].lstrip("/"))
        for each in self.container["env"]:
            if "value" in each and each["name"] != "HOME":
                monkeypatch.setenv(each["name"], self.here(each["value"]))

    def _write(self, documents: list[Document], volume: Document, folder: Path) -> None:
        folder.mkdir(parents=True)
        if "secret" in volume:
            data = engine.named(documents, "Secret", volume["secret"]["secretName"])["stringData"]
            for item in volume["secret"]["items"]:
                (folder / item["path"]).write_text(data[item["key"]])
        else:
            for name, text in engine.named(documents, "ConfigMap", volume["configMap"]["name"])["data"].items():
                (folder / name).write_text(text)

    def here(self, text: str) -> str:
        return text.replace(CONTAINER_PATHS, str(self._root) + CONTAINER_PATHS)

    @property
    def arguments(self) -> list[str]:
        return [self.here(each) for each in self.container["args"]]


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def mount(documents: list[Document], component: str) -> Mounted:
        return Mounted(documents, component, tmp_path / component, monkeypatch)

    return mount


def assert_opened(config: Config, service: str, secret: dict[str, str]) -> None:
    """Its own server serves the cluster under its own token; the others' stay closed."""
    for each in SERVICES:
        server = getattr(config, each).server
        if each == service:
            assert (server.host, server.grpc_port, server.http_port) == ("0.0.0.0", 50051, 8080)
            assert server.token == secret[f"{service}-token"]
        else:
            assert (server.host, server.token) == ("127.0.0.1", None)
    assert config.redis.url == secret["redis-url"]


@pytest.mark.parametrize("service", ["rollout", "reward"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_service_parses_what_the_chart_renders(name: str, service: str, mounted: Any) -> None:
    documents = render(preset(name))
    pod = mounted(documents, service)

    assert pod.container["command"] == ["python3", "-m", f"services.{service}"]
    config = parse_service_arguments(service, pod.arguments)
    assert_opened(config, service, engine.named(documents, "Secret", "demo-trivet")["stringData"])
    ports = {each["name"]: each["containerPort"] for each in pod.container["ports"]}
    assert getattr(config, service).server.grpc_port == ports["grpc"]
    assert getattr(config, service).server.http_port == ports["http"]


@pytest.mark.parametrize("name", ["cpu", "single-node"])
def test_one_rank_is_started_without_torchrun(name: str, mounted: Any) -> None:
    documents = render(preset(name))
    pod = mounted(documents, "trainer")

    assert pod.container["command"] == ["python3", "-m", "services.trainer"]
    config = parse_service_arguments("trainer", pod.arguments)
    assert_opened(config, "trainer", engine.named(documents, "Secret", "demo-trivet")["stringData"])


def test_a_trainer_that_hands_weights_over_may_call_the_rollouts(mounted: Any) -> None:
    documents = render(preset("single-node", "config.weights={transfer: nccl}"))
    secret = engine.named(documents, "Secret", "demo-trivet")["stringData"]

    for service in ("trainer", "rollout"):
        config = parse_service_arguments(service, mounted(documents, service).arguments)
        assert config.weights.transfer == "nccl"
        assert config.rollout.server.token == secret["rollout-token"]
        assert (config.reward.server.token, getattr(config, service).server.host) == (None, "0.0.0.0")


def torchrun(arguments: list[str]) -> Any:
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args(arguments)


def test_several_ranks_of_one_node_come_from_torchrun(mounted: Any) -> None:
    documents = render(preset("single-node", "trainer.gpusPerNode=4"))
    pod = mounted(documents, "trainer")

    assert pod.container["command"] == ["python3", "-m", "services.trainer.launch"]
    launch = torchrun(pod.arguments)
    assert (launch.standalone, launch.nproc_per_node, launch.shutdown_timeout) == (True, "4", 600)
    assert (launch.module, launch.training_script) == (True, "services.trainer")
    config = parse_service_arguments("trainer", launch.training_script_args)
    assert_opened(config, "trainer", engine.named(documents, "Secret", "demo-trivet")["stringData"])


def started(pod: Mounted, folder: Path, index: int) -> list[str]:
    """What the pod's shell would start, asked of a stand-in for python3 that tells its arguments."""
    folder.mkdir()
    stand_in = folder / "python3"
    stand_in.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stand_in.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index)}
    command = [*pod.container["command"], *pod.arguments]
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=20)
    reported: list[str] = json.loads(ended.stdout)
    return reported


@pytest.mark.parametrize(("values", "nodes", "ranks"), [("multi-node", 2, 8), ("cpu", 3, 2)])
def test_several_nodes_meet_by_torchrun_s_rendezvous(
    values: str, nodes: int, ranks: int, mounted: Any, tmp_path: Path
) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.run import config_from_args

    documents = render(preset(values, *(CPU_ON_THREE_NODES if values == "cpu" else ())))
    pod = mounted(documents, "trainer")
    addresses = []
    for index in range(2):
        module, name, *arguments = started(pod, tmp_path / str(index), index)
        assert [module, name] == ["-m", "services.trainer.launch"]
        launch, _, script_arguments = config_from_args(torchrun(arguments))
        assert (launch.min_nodes, launch.max_nodes, launch.nproc_per_node) == (nodes, nodes, ranks)
        assert launch.rdzv_endpoint == "demo-trivet-trainer-0.demo-trivet-trainer-nodes:29400"
        addresses.append(launch.local_addr)
        parameters = RendezvousParameters(
            backend=launch.rdzv_backend,
            endpoint=launch.rdzv_endpoint,
            run_id=launch.run_id,
            min_nodes=nodes,
            max_nodes=nodes,
            **launch.rdzv_configs,
        )
        # Pod 0 holds the store that the others look for.
        assert parameters.get_as_bool("is_host") is (index == 0)
        assert (
            parameters.get_as_int("join_timeout")
            == engine.chart().merge_values(preset(values))["trainer"]["startSeconds"]
        )
        assert parameters.get_as_int("read_timeout") == 300
    assert addresses == [f"demo-trivet-trainer-{index}.demo-trivet-trainer-nodes" for index in range(2)]
    offset = script_arguments.index("--config")
    config = parse_service_arguments("trainer", script_arguments[offset:])
    assert_opened(config, "trainer", engine.named(documents, "Secret", "demo-trivet")["stringData"])


def test_rank_0_is_pod_0_s_as_service_and_probes_take_it() -> None:
    """torchrun hands out ranks in the order of addresses; of ten and more names pod 0's is still the first."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

    nodes = [_NodeDesc(f"demo-trivet-trainer-{index}.demo-trivet-trainer-nodes", 100 - index, 0) for index in range(12)]
    assert sorted(nodes)[0] is nodes[0]
    assert sorted(_NodeDesc(ip, 100, 0) for ip in ("10.0.0.9", "10.0.0.10"))[0].addr == "10.0.0.10"


def test_the_rendezvous_is_where_the_headless_service_names_pod_0() -> None:
    documents = render(preset("multi-node"))
    job = engine.named(documents, "Job", "demo-trivet-trainer")
    arguments = engine.container(documents, "trainer")["args"]

    (endpoint,) = [each.partition("=")[2] for each in arguments if each.startswith("--rdzv-endpoint=")]
    host, port = endpoint.split(":")
    # An indexed Job's pods are called JOB-INDEX; a subdomain makes that a name.
    assert host == f"{job['metadata']['name']}-0.{job['spec']['template']['spec']['subdomain']}"
    service = engine.named(documents, "Service", job["spec"]["template"]["spec"]["subdomain"])
    assert int(port) in [each["port"] for each in service["spec"]["ports"]]


def test_prepare_makes_what_the_others_wait_for(mounted: Any) -> None:
    documents = render(preset("cpu"))
    pod = mounted(documents, "prepare")
    (mark,) = pod.container["args"]

    script = pod.container["command"][2]
    program, file, *arguments = shlex.split(pod.here(script.partition(";")[0]))
    assert (program, (engine.ROOT / "deploy/docker" / file).exists()) == ("python3", True)
    config = parse_service_arguments("prepare", arguments)
    assert config.prepare is not None
    assert mark.startswith(f"/srv/trivet/{config.prepare.creates}.prepared-")
    for each in ("rollout", "trainer"):
        (waiting,) = engine.pod_templates(documents)[each]["spec"]["initContainers"]
        assert waiting["args"][0] == mark
    other = render(preset("cpu", "config.prepare.command=[python, -m, other]"))
    assert engine.container(other, "prepare")["args"] != [mark]


def test_helm_test_asks_the_services_that_have_pods() -> None:
    def arguments(*changes: str) -> list[str]:
        asked: list[str] = engine.container(render(preset("multi-node", *changes)), "test")["args"]
        return asked

    assert "--weights=qwen3-30b-a3b:weights" in arguments()
    assert not any(each.startswith("--service") for each in arguments())
    assert "--weights=qwen3-30b-a3b:weights" not in arguments("trainer.suspend=true")
    assert "--service=demo-trivet-reward:8080" in arguments("reward.autoscaling={kind: none}")

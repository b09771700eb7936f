"""The chart's trainer on two nodes, one rank each under ZeRO-3: both stopped, started again, one killed and replaced.

A node is torchrun as the chart's pod would start it, with loopback addresses in the order of the pods' names.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.common.run_files.run_log import RunLog
from services.trainer.checkpoint.directory import Checkpoints
from tests.support.deploy import chart_engine as chart
from tests.support.leftovers import family, kill
from tests.support.runs.quickstart_run import quickstart_tree

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 30, 5
POD, PODS = "demo-trivet-trainer", "demo-trivet-trainer-nodes"
TWO_NODES = (
    "singleNode=false",
    "trainer.nodes=2",
    "trainer.processesPerNode=1",
    "trainer.workerRestarts=2",
    "trainer.startSeconds=120",
    "trainer.stopSeconds=60",
    "storage.runs.accessMode=ReadWriteMany",
    "storage.inputs.accessMode=ReadWriteMany",
)


@dataclass
class Node:
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def vanish(self) -> None:
        """As a node that loses power: nothing of it says goodbye."""
        kill(family(self.process.pid))
        self.process.wait(10)


class Cluster:
    def __init__(self, directory: Path, model: Path) -> None:
        self._directory, self.nodes = directory, list[Node]()
        self.run = directory / "runs" / "quickstart-dpo"
        tree = quickstart_tree(model, "quickstart-dpo")
        tree["run"]["directory"] = str(directory / "runs")
        tree["evaluation"]["every"] = 0
        tree["trainer"] |= {"steps": STEPS, "groups_per_step": 24, "checkpoint_every": EVERY, "zero_stage": 3}
        tree["trainer"]["server"] = {"grpc_port": 0, "http_port": 0}
        tree["trainer"]["deepspeed"] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
        (directory / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        self._container = chart.container(chart.render(chart.preset("cpu", *TWO_NODES)), "trainer")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._rendezvous = free.getsockname()

    def start(self, index: int) -> Node:
        log = self._directory / f"node-{index}-{len(self.nodes)}.log"
        environment = {
            **{key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}",
            "OMP_NUM_THREADS": "1",
            **{each["name"]: each["value"] for each in self._container["env"] if each["name"].startswith("TORCH")},
            "JOB_COMPLETION_INDEX": str(index),
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._command(),
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(Node(process, log))
        return self.nodes[-1]

    def _command(self) -> list[str]:
        """The chart's up to the module, its names of pods as this machine knows them."""
        command = [*self._container["command"], *self._container["args"]]
        launch = command[: command.index("services.trainer") + 1]
        host, port = self._rendezvous
        for there, here in (
            (f"--rdzv-endpoint={POD}-0.{PODS}:29400", f"--rdzv-endpoint={host}:{port}"),
            (
                f'--local-addr="{POD}-$JOB_COMPLETION_INDEX.{PODS}"',
                '--local-addr="127.0.0.$((JOB_COMPLETION_INDEX + 2))"',
            ),
        ):
            assert sum(there in each for each in launch) == 1
            launch = [each.replace(there, here) for each in launch]
        return [*launch, "--config", str(self._directory / "run.yaml")]

    def steps(self) -> list[int]:
        return [entry["step"] for entry in RunLog(self.run).steps()]

    def until(self, condition: Callable[[], Any], seconds: float = 120) -> float:
        """How long it took."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > seconds:
                pytest.fail("\n".join(f"{node.log.name}:\n{node.said[-3000:]}" for node in self.nodes))
            time.sleep(0.05)
        return time.monotonic() - started


@pytest.fixture(scope="module")
def cluster(quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("nodes"), quickstart_model)
    yield found
    for node in found.nodes:
        if node.process.poll() is None:
            node.vanish()


def test_two_nodes_train_stop_go_on_and_outlive_the_loss_of_one(cluster: Cluster) -> None:
    first = [cluster.start(index) for index in (1, 0)]
    cluster.until(lambda: len(cluster.steps()) >= 2)
    # Rank 0 serves, and the chart looks for it in pod 0.
    assert ['"serving"' in node.said for node in first] == [False, True]
    for node in first:
        node.process.send_signal(signal.SIGTERM)
    cluster.until(lambda: all(node.process.poll() is not None for node in first), 60)
    checkpoints = Checkpoints(cluster.run / "checkpoints", keep=3)
    stopped = checkpoints.latest()
    assert stopped is not None
    assert stopped.state.step == cluster.steps()[-1] < STEPS, [node.said for node in first]
    assert stopped.state.world_size == 2
    engine = sorted(path.name for path in stopped.engine.rglob("*") if path.is_file())
    assert [name for name in engine if name.startswith("random-")] == [f"random-{rank}.safetensors" for rank in (0, 1)]
    assert sum(name.endswith("optim_states.pt") for name in engine) == 2

    survivor, lost = cluster.start(0), cluster.start(1)
    cluster.until(lambda: cluster.steps()[-1] > stopped.state.step)
    lost.vanish()
    noticed = cluster.until(lambda: "Connection closed by peer" in survivor.said or "reset by peer" in survivor.said)
    assert noticed < 30
    assert survivor.process.poll() is None, survivor.said
    replacement = cluster.start(1)
    cluster.until(lambda: all(node.process.poll() is not None for node in (survivor, replacement)))
    assert (survivor.process.returncode, replacement.process.returncode) == (0, 0), survivor.said + replacement.said
    assert '"serving"' not in replacement.said
    finished = checkpoints.latest()
    assert finished is not None
    assert finished.state.step == STEPS
    assert finished.state.history == stopped.state.history
    # One rank alone writes, and steps that a checkpoint did not hold are reported again.
    assert sorted(set(cluster.steps())) == list(range(1, STEPS + 1))

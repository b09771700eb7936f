from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from trivet.v1 import rollout_pb2, rollout_pb2_grpc, sample_pb2

from services.common.config import Config, parse_config
from services.common.errors import InvalidData, Unavailable
from services.common.transport.weight_feed import describe_weights
from services.common.wire.replay_data import CandidateSets, Replay, encode_replay
from services.trainer.audit import __main__ as main_module
from services.trainer.audit import sampling as module
from services.trainer.audit.sampling import RolloutClient, audit_prompts, sample, usable_samples
from services.trainer.audit.weights import find_weights
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.data.prompts import PromptData, PromptRow, PromptSet

TOKEN = "a-token-of-sixteen-or-more"
FACTS = ModelFacts("qwen3_moe", vocabulary=96, moe_layers=2, experts=8, experts_per_token=2, packs=True)
PROMPT = [3, 4, 5]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("initialBackoff", "maxBackoff"):
        monkeypatch.setitem(module._RETRY["methodConfig"][0]["retryPolicy"], name, "0.01s")


@dataclass
class FakeRollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Group i is drawn under weights[i]; before that, each call in `failures` is aborted with its code."""

    weights: list[tuple[int, str]]
    failures: list[grpc.StatusCode] = field(default_factory=list)
    seen: list[sample_pb2.Prompt] = field(default_factory=list)

    def Generate(self, request, context):
        if dict(context.invocation_metadata()).get("authorization") != f"Bearer {TOKEN}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "expected a token")
        if self.failures:
            context.abort(self.failures.pop(0), "not now")
        self.seen.append(request.prompt)
        return response(request.prompt, *self.weights[request.prompt.request])

    def GetStatus(self, request, context):
        return rollout_pb2.RolloutServiceGetStatusResponse(rollout_id="fake", version=1, fingerprint="one")


def response(
    prompt: sample_pb2.Prompt, version: int, fingerprint: str, *, rows: int = 4, outside: bool = False
) -> rollout_pb2.GenerateResponse:
    """Two samples of two tokens after a prompt of three: [3 + 2 − 1] rows of routing."""
    group = sample_pb2.Group(prompt=prompt, rollout_id="fake", lineage=sample_pb2.Lineage(weights=fingerprint))
    replays = []
    for index in range(prompt.group_size):
        sample_id = f"{prompt.group_id}/0/{index}"
        span = sample_pb2.VersionSpan(version=version, start=0, end=2)
        group.samples.append(
            sample_pb2.Sample(
                sample_id=sample_id,
                index=index,
                token_ids=[7, 8],
                logprobs=[-0.5, -0.25],
                finish_reason=sample_pb2.FINISH_REASON_STOP,
                versions=[span],
            )
        )
        sets = CandidateSets(np.array([2, 1], np.int32), np.array([7, 9, 10 if outside else 8], np.int32))
        routing = np.tile(np.array([1, 6], np.uint8), (rows, 2, 1))
        replays.append(encode_replay(sample_id, Replay(routing, sets)))
    return rollout_pb2.GenerateResponse(group=group, replay=replays)


def prompt(request: int = 0) -> sample_pb2.Prompt:
    sampling = sample_pb2.SamplingParameters(temperature=1.0, top_k=20, top_p=0.9, max_tokens=8)
    return sample_pb2.Prompt(
        group_id=f"audit-{request}", request=request, token_ids=PROMPT, group_size=2, sampling=sampling
    )


@pytest.fixture
def serve() -> Iterator:
    started = []

    def start(rollout: FakeRollout, token: str | None = TOKEN) -> RolloutClient:
        server = grpc.server(futures.ThreadPoolExecutor(4))
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollout, server)
        client = RolloutClient(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", token)
        server.start()
        started.extend([client.close, lambda: server.stop(None).wait(5)])
        return client

    yield start
    for end in started:
        end()


def test_groups_of_one_version_come_back_in_order(serve) -> None:
    rollout = FakeRollout([(1, "one")] * 12)
    sampled = sample(serve(rollout), [prompt(request) for request in range(12)], 20)
    assert (sampled.rollout_id, sampled.version, sampled.fingerprint) == ("fake", 1, "one")
    assert [found.group.prompt.request for found in sampled.responses] == list(range(12))
    assert sampled.left_out == 0


def test_groups_of_other_versions_are_left_out_and_counted(serve) -> None:
    drawn = [(1, "one"), (2, "two"), (1, "one+two"), (2, "two"), (3, "three")]
    sampled = sample(serve(FakeRollout(drawn)), [prompt(request) for request in range(5)], 20)
    assert (sampled.version, sampled.fingerprint) == (2, "two")
    assert [found.group.prompt.request for found in sampled.responses] == [1, 3]
    assert sampled.left_out == 3


def test_nothing_of_one_version_is_no_audit(serve) -> None:
    with pytest.raises(Unavailable) as moved:
        sample(serve(FakeRollout([(1, "one+two")])), [prompt()], 20)
    assert moved.value.code == "weights_moved"


def test_a_busy_rollout_is_asked_again_and_a_broken_one_not_for_ever(serve) -> None:
    busy = FakeRollout([(1, "one")], [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
    assert sample(serve(busy), [prompt()], 20).version == 1
    broken = FakeRollout([(1, "one")], [grpc.StatusCode.INTERNAL])
    with pytest.raises(Unavailable, match="internal: not now"):
        sample(serve(broken), [prompt()], 20)


@pytest.mark.parametrize("token", [None, "another-token-of-sixteen"])
def test_a_wrong_token_is_refused_with_the_rollouts_words(serve, token) -> None:
    with pytest.raises(InvalidData, match="unauthenticated: expected a token"):
        sample(serve(FakeRollout([(1, "one")]), token), [prompt()], 20)


def test_samples_become_what_the_trainer_trains_on() -> None:
    samples, refused = usable_samples([response(prompt(), 1, "one")], FACTS)
    assert not refused
    assert [found.sample_id for found in samples] == ["audit-0/0/0", "audit-0/0/1"]
    assert samples[0].replay.routing.shape == (4, 2, 2)
    assert samples[0].temperature == 1.0


@pytest.mark.parametrize(
    ("broken", "code"),
    [({"rows": 5}, "routing_rows"), ({"outside": True}, "token_outside_candidates")],
)
def test_what_the_trainer_would_refuse_is_reported_and_the_rest_used(broken, code) -> None:
    responses = [response(prompt(0), 1, "one", **broken), response(prompt(1), 1, "one")]
    samples, refused = usable_samples(responses, FACTS)
    assert [found.sample_id for found in samples] == ["audit-1/0/0", "audit-1/0/1"]
    assert [(found.group_id, found.code) for found in refused] == [("audit-0", code)]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tree = yaml.safe_load((Path(__file__).parents[4] / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    tree["run"]["directory"] = str(tmp_path / "runs")
    tree["model"]["path"] = str(tmp_path / "model")
    return parse_config(tree)


def test_prompts_are_whole_groups_of_training_rows_under_ids_of_their_own(config) -> None:
    rows = [PromptRow(str(index), f"sort {index}", [3, index], "{}") for index in range(5)]
    data = PromptData(PromptSet(rows, 0, False), PromptSet(rows, 0, False), "data", 0)
    first, second = audit_prompts(config, data, 20), audit_prompts(config, data, 20)
    assert [found.prompt_id for found in first] == ["0", "1", "2"]
    assert all(found.group_size == 8 and found.purpose == sample_pb2.PURPOSE_TRAIN for found in first)
    ids = {found.group_id for found in [*first, *second]}
    assert len(ids) == 6
    assert all(group_id.startswith("audit-") for group_id in ids)


def write_weights(directory: Path, value: float) -> str:
    directory.mkdir(parents=True)
    save_file({"w": np.full(3, value, np.float32)}, directory / "model.safetensors")
    return describe_weights(directory, 0).fingerprint


def test_weights_are_found_by_fingerprint(config, tmp_path: Path) -> None:
    base = write_weights(Path(config.model.path), 0.0)
    staged = tmp_path / "staged"
    published = write_weights(staged, 1.0)
    final = config.run.path / "weights" / f"v000004-{published[:8]}"
    final.parent.mkdir(parents=True)
    staged.rename(final)
    assert find_weights(config, 4, published) == str(final)
    assert find_weights(config, 0, base) == config.model.path


def test_weights_that_are_nowhere_or_changed_are_refused_with_a_sentence(config) -> None:
    write_weights(Path(config.model.path), 0.0)
    with pytest.raises(InvalidData, match="version 9") as unknown:
        find_weights(config, 9, "0123456789abcdef")
    assert unknown.value.code == "weights_unknown"
    write_weights(config.run.path / "weights" / "v000009-01234567", 2.0)
    with pytest.raises(InvalidData, match="fingerprint 0123456789abcdef"):
        find_weights(config, 9, "0123456789abcdef")
    with pytest.raises(InvalidData, match="fingerprint none"):
        find_weights(config, 0, "")


def test_a_hub_model_at_its_start_is_the_model_itself(config) -> None:
    config.model.path = "organisation/model"
    assert find_weights(config, 0, "") == "organisation/model"


def test_the_process_tells_failures_apart_by_its_status(config, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(main_module, "configure_logs", lambda *_: None)
    file, output = tmp_path / "run.yaml", tmp_path / "report.json"
    file.write_text(yaml.safe_dump(config.dump()), encoding="utf-8")
    arguments = ["--config", str(file), "--rollout", "127.0.0.1:1", "--output", str(output)]
    assert main_module.main([*arguments, "--set", "trainer.stepz=3"]) == 2
    assert "trainer.stepz is not a known key" in capsys.readouterr().out
    assert main_module.main(arguments) == 1
    assert "rollout at 127.0.0.1:1: unavailable" in capsys.readouterr().out
    assert not output.exists()
    with pytest.raises(SystemExit):
        main_module.main([*arguments, "--samples", "0"])
    assert "is 0, expected at least 1" in capsys.readouterr().err

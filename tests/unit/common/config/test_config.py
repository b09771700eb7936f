from pathlib import Path

import pytest
import yaml

from services.common.config import ConfigError, load_config, parse_config

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.yaml"


@pytest.fixture
def tree():
    return yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))


def test_the_quickstart_has_all_four_mechanisms_on(tree):
    stability = parse_config(tree).rl_stability
    assert stability.unbiased_kl.enabled
    assert stability.sequence_masking.enabled
    assert stability.consistency.keep_routing
    assert stability.consistency.keep_sampling_mask
    assert stability.importance_sampling.mode != "none"


def test_overrides_are_yaml(tree):
    config = load_config(
        QUICKSTART, ["trainer.steps=7", "rl_stability.consistency.keep_routing=false", "data.system_prompt=hi"]
    )
    assert (config.trainer.steps, config.data.system_prompt) == (7, "hi")
    assert not config.rl_stability.consistency.keep_routing


def test_all_combinations_that_cannot_work_are_reported_at_once():
    overrides = ["sampling.group_size=1", "trainer.minibatches=5", "rollout.server.host=0.0.0.0"]
    with pytest.raises(ConfigError) as refusal:
        load_config(QUICKSTART, overrides)
    for words in ("sampling.group_size is 1", "trainer.groups_per_step is 32", "rollout.server.token is missing"):
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.stpes=7", "trainer.stpes is not a known key: did you mean steps?"),
        ("nonsense.key=1", "nonsense is not a known key"),
        ("trainer.steps=0", "trainer.steps is 0: "),
        ("trainer.steps=many", "trainer.steps is 'many': "),
        ("run.name=Not_Good", "run.name is 'Not_Good': "),
        ("redis.url=localhost:6379", "expected a redis://, rediss:// or unix:// address"),
        ("sampling.group_size=1", "sampling.group_size is 1, expected at least 2: grpo compares"),
        ("sampling.max_tokens=60", "model.max_length is 64, expected at least 92"),
        ("trainer.tokens_per_microbatch=32", "a long sample would fit in no micro-batch"),
        ("trainer.minibatches=5", "trainer.groups_per_step is 32, expected a multiple of trainer.minibatches (5)"),
        ("trainer.max_staleness=5", "trainer.keep_weights is 4, expected at least trainer.max_staleness + 2 (7)"),
        ("rl_stability.importance_sampling={clip_min: 3.0, cap: 2.0}", "clip_min is 3.0, expected less than cap (2.0)"),
        (
            "rl_stability={consistency: {keep_sampling_mask: false}, importance_sampling: {mode: none}}",
            "nothing would correct the ratio",
        ),
        ("rollout.server.host=0.0.0.0", "rollout.server.token is missing: host 0.0.0.0 can be reached"),
        ("rollout.engine={dtype: half}", "engine sets ['dtype'], which Trivet sets itself"),
        ("rollout.engine={override_generation_config: {top_k: 5}}", "each request carries its own sampling settings"),
        (
            "rollout.engine={generation_config: vllm}",
            "rollout.engine.generation_config is not supported: a sample ends",
        ),
        ("rollout.engine={logits_processors: [mine.Processor]}", "the trainer cannot replay"),
        ("rollout.engine={hf_overrides: {rope_theta: 1.0}}", "the trainer reads model.path as it is"),
        ("rollout.engine={quantization: fp8}", "rollout.engine.quantization is not supported: new weights come as"),
        ("rollout.engine={enable_lora: true}", "there are no adapters"),
        ("rollout.engine={gpu_memory_utilisation: 0.5}", "gpu_memory_utilisation is not supported, expected one of "),
        ("trainer.deepspeed={tensor_parallel: {autotp_size: 2}}", "trainer.deepspeed.tensor_parallel is not supported"),
        ("trainer.deepspeed={sequence_parallel_size: 2}", "batches are split over all ranks"),
        ("trainer.deepspeed={expert_parallel: {size: 2}}", "trainer.deepspeed.expert_parallel is not supported"),
        ("trainer.deepspeed={pipeline: {stages: 2}}", "trainer.deepspeed.pipeline is not supported"),
        (
            "trainer.deepspeed={curriculum_learning: {enabled: true}}",
            "curriculum_learning is not supported, expected one",
        ),
        ("trainer.deepspeed={zero_optimization: {zero_quantized_weights: true}}", "zero_quantized_weights is not"),
        ("trainer.deepspeed={zero_optimization: 3}", "trainer.deepspeed.zero_optimization is 3, expected keys"),
        (
            "trainer.deepspeed={zero_optimization: {offload_optimizer: {device: nvme}}}",
            "offload_optimizer is {'device': 'nvme'}, expected device cpu",
        ),
        ("trainer.deepspeed={zero_optimization: {stage: 3}}", "trainer.deepspeed sets ['zero_optimization.stage']"),
        (
            "data={train: {kind: jsonl, path: a.jsonl}, chat_template: false, system_prompt: hi}",
            "system_prompt is given",
        ),
        ("algorithm.overlong_buffer=17", "expected at most sampling.max_tokens (16)"),
        ("rollout.logprobs_mode=raw_logits", "raw values do not tell which tokens were excluded"),
        ("rollout.logprobs_mode=raw", "rollout.logprobs_mode is 'raw'"),
        ("reward.maximum=-1", "minimum is 0.0, expected less than maximum (-1.0)"),
        ("reward.maximum=1e39", "reward.maximum"),
        ("reward.minimum=-1e39", "reward.minimum"),
        ("data.train={kind: jsonl, path: data.csv}", "expected a .jsonl file"),
        ("data.train={kind: reasoning_gym, path: gcd}", "size is missing"),
        ("sampling.min_p=0.1", "sampling.min_p is not a known key"),
        ("sampling.temperature=0.005", "sampling.temperature is 0.005: Input should be greater than or equal to 0.01"),
        ("sampling.temperature=0.0099", "sampling.temperature is 0.0099: "),
        ("sampling.temperature=2.01", "sampling.temperature is 2.01: Input should be less than or equal to 2"),
        ("sampling.top_p=0.99999999", "sampling.top_p: is 0.99999999, which is 1 in float32"),
        ("sampling.top_p=1.0e-60", "sampling.top_p: is 1e-60, which is 0 in float32"),
        ("sampling.top_k=4294967296", "sampling.top_k is 4294967296: "),
        ("sampling.group_size=5000", "sampling.group_size is 5000: Input should be less than or equal to 4096"),
        ("evaluation.samples=5000", "evaluation.samples is 5000: Input should be less than or equal to 4096"),
        ("sampling.repetition_penalty=1.1", "sampling.repetition_penalty is not a known key"),
        ("rollout.engine.weight_transfer_config={backend: nccl}", "which Trivet sets itself"),
        ("weights.transfer=rdma", "weights.transfer is 'rdma'"),
        ("weights.disk_every=33", "weights.disk_every is 33"),
        ("weights.transfer=nccl", "expected disk with trainer.device cpu: it goes from GPU to GPU"),
        ("weights.transfer=ipc", "expected disk with trainer.device cpu: it goes from GPU to GPU"),
        ("trainer", "expected section.key=value"),
        ("run.name.first=x", "name is not a section"),
    ],
)
def test_what_cannot_work_is_refused_at_load_with_a_sentence(override, sentence):
    with pytest.raises(ConfigError) as refusal:
        load_config(QUICKSTART, [override])
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.processes=2", "expected nccl or disk with trainer.processes 2: ipc hands over the memory of one GPU"),
        (
            "rollout.engine={tensor_parallel_size: 2}",
            "expected nccl or disk with rollout.engine.tensor_parallel_size 2",
        ),
    ],
)
def test_ipc_stays_within_one_gpu(override, sentence):
    gpu = ["trainer.device=auto", "weights.transfer=ipc"]
    with pytest.raises(ConfigError) as refusal:
        load_config(QUICKSTART, [*gpu, override])
    assert sentence in str(refusal.value)
    assert load_config(QUICKSTART, ["trainer.device=auto", "weights.transfer=nccl", override]).weights.disk_every == 10


def test_engines_of_one_rollout_are_not_told_apart():
    with pytest.raises(ConfigError, match="data_parallel_size 2: start as many rollouts instead"):
        load_config(
            QUICKSTART,
            ["trainer.device=auto", "weights.transfer=nccl", "rollout.engine={data_parallel_size: 2}"],
        )


def test_preferences_have_no_rollout_to_hand_weights_to():
    dpo = QUICKSTART.with_name("quickstart-dpo.yaml")
    with pytest.raises(ConfigError, match=r"expected disk with data\.preferences"):
        load_config(dpo, ["trainer.device=auto", "weights.transfer=nccl"])


def test_a_group_of_one_cannot_be_filtered_by_variance():
    with pytest.raises(ConfigError, match="a group of one never has variance"):
        load_config(QUICKSTART, ["algorithm={name: ppo, dynamic_sampling: true}", "sampling.group_size=1"])


def test_vllms_native_capture_needs_top_k():
    with pytest.raises(ConfigError, match="needs top_k when top_p is set"):
        load_config(QUICKSTART, ["rollout.capture=native", "sampling.top_k=0"])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run=null", "run.name is missing, expected for example `run: {name: my-run}`"),
        ("run={seed: 1}", "run.name is missing, expected for example `run: {name: my-run}`"),
        ("model={}", "model.path is missing, expected for example `model: {path: models/quickstart}`"),
        ("data=null", "data.train.kind is missing, expected for example `data: {train: {kind: jsonl, path: data/train"),
        ("data={train: {kind: jsonl}}", "data.train.path is missing, expected for example `data: {train: {path: data"),
        ("reward.scorers=[{}]", "reward.scorers.0.name is missing, expected for example `reward: {scorers: [{name: ex"),
        ("prepare={creates: x}", "prepare.command is missing, expected for example `prepare: {command: [python, -m,"),
    ],
)
def test_what_is_missing_is_named_with_what_to_write(override, sentence):
    with pytest.raises(ConfigError) as refusal:
        load_config(QUICKSTART, [override])
    assert sentence in str(refusal.value)


def test_an_empty_file_lacks_what_every_run_needs(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("# nothing yet\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refusal:
        load_config(file)
    for key in ("run.name", "model.path", "data.train.kind"):
        assert f"{key} is missing, expected for example `" in str(refusal.value)


@pytest.mark.parametrize("name", ["my_run", "a", "7_x-y", "a" * 63])
def test_names_of_runs(name):
    assert load_config(QUICKSTART, [f"run.name={name}"]).run.path == Path("runs") / name


@pytest.mark.parametrize("name", ["_x", "A", "a b", "a:b", "a/b", "a" * 64])
def test_names_of_runs_that_are_refused(name):
    with pytest.raises(ConfigError, match=r"run\.name is .*pattern '\^\[a-z0-9\]\[a-z0-9_-\]\{0,62\}\$'"):
        load_config(QUICKSTART, [f"run.name={name!r}"])


@pytest.mark.parametrize(
    ("content", "sentence"), [("- a\n", "holds list"), ("a: [", "is not YAML"), (None, "cannot be read")]
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, sentence):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=sentence):
        load_config(path)


def test_dump_and_parse_agree(tree):
    config = parse_config(tree)
    assert parse_config(config.dump()) == config


def test_the_environment_overrides_the_file_and_set_overrides_both(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("0123456789abcdef0\n", encoding="utf-8")
    environment = {
        "TRIVET__TRAINER__STEPS": "9",
        "TRIVET__REDIS__URL": "redis://:pass@redis:6379/0",
        "TRIVET__TRAINER__SERVER__TOKEN__FILE": str(secret),
        "OTHER": "x",
        "TRIVET_TOKEN": "x",
    }
    config = load_config(QUICKSTART, environment=environment)
    assert (config.trainer.steps, config.redis.url) == (9, "redis://:pass@redis:6379/0")
    # A secret stays text, whatever it looks like.
    assert config.trainer.server.token == "0123456789abcdef0"
    assert load_config(QUICKSTART, ["trainer.steps=3"], environment).trainer.steps == 3


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("TRIVET__TRAINER__STPES", "7", "trainer.stpes is not a known key"),
        ("TRIVET__TRAINER", "[", "environment variable TRIVET__TRAINER: is not YAML"),
        ("TRIVET__RUN__NAME__X", "1", "environment variable TRIVET__RUN__NAME__X: name is not a section"),
        (
            "TRIVET__REDIS__URL__FILE",
            "/nowhere/url",
            "environment variable TRIVET__REDIS__URL__FILE: /nowhere/url cannot",
        ),
    ],
)
def test_a_bad_environment_is_refused_by_name(name, value, sentence):
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, environment={name: value})
    assert sentence in str(caught.value)


def test_prompts_or_preferences(tree):
    pairs = {"preferences": {"kind": "jsonl", "path": "pairs.jsonl"}}
    for data, sentence in (
        ({}, "neither is given, expected either train"),
        ({**tree["data"], **pairs}, "both are given, expected either train"),
        ({**pairs, "validation": tree["data"]["validation"]}, "validation is given, expected none"),
        ({"preferences": {"kind": "jsonl", "path": "pairs.csv"}}, "expected a .jsonl file"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_config({**tree, "data": data})
        assert sentence in str(caught.value)
    offline = {**tree, "data": pairs, "algorithm": {"name": "dpo"}, "model": {"path": "m", "max_length": 64}}
    del offline["reward"]
    offline["data"] = {**pairs, "max_prompt_tokens": 32}
    assert parse_config(offline).data.train is None
    with pytest.raises(ConfigError, match="expected at least twice model.max_length"):
        parse_config({**offline, "trainer": {"tokens_per_microbatch": 64}})
    with pytest.raises(ConfigError, match="reward.scorers is empty"):
        parse_config({**tree, "reward": {}})

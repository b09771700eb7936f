"""One audit, from prompts to report."""

from collections.abc import Sequence

from trivet.v1 import sample_pb2

from services.common.config import Config
from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.common.run_files.audit_report import AuditReport, ReplayKind
from services.trainer.audit.compare import compare
from services.trainer.audit.sampling import RolloutClient, Sampled, audit_prompts, sample, usable_samples
from services.trainer.audit.weights import find_weights
from services.trainer.data.prompts import PromptData, load_prompts
from services.trainer.engine.plain_engine import PlainEngine, plain_device
from services.trainer.model.policy import Policy, load_policy

# A trainer that publishes may have removed a version by the time it is to be read.
ATTEMPTS = 3

log = get_logger(__name__)


def audit(config: Config, client: RolloutClient, samples: int) -> AuditReport:
    """Samples, and compares under the weights that drew the samples.

    Raises InvalidData where the weights cannot be had or nothing of what came back can be used, Unavailable where the
    rollout fails.
    """
    status = client.status()
    find_weights(config, status.version, status.fingerprint)
    sampled, path, policy = _sample_and_load(config, client, audit_prompts(config, _data(config), samples))
    engine = PlainEngine(policy, plain_device(config))
    usable, refused = usable_samples(sampled.responses, engine.facts)
    if not usable:
        raise InvalidData(
            "nothing_usable", f"every group is refused, the first with {refused[0].code}: {refused[0].reason}"
        )
    comparison = compare(usable, engine, tokens_per_microbatch=config.trainer.tokens_per_microbatch)
    return AuditReport(
        run=config.run.name,
        model_type=engine.facts.model_type,
        dtype=config.model.dtype,
        rollout_id=sampled.rollout_id,
        weights_version=sampled.version,
        weights_fingerprint=sampled.fingerprint,
        weights_path=path,
        samples=len(usable),
        tokens=sum(len(sample.token_ids) for sample in usable),
        groups_left_out=sampled.left_out,
        configured=_configured(config, comparison.rows[0].replayed),
        rows=comparison.rows,
        candidates=comparison.candidates,
        refused=tuple(refused),
    )


def _data(config: Config) -> PromptData:
    from transformers import AutoTokenizer

    return load_prompts(config.data, AutoTokenizer.from_pretrained(config.model.path), config.run.seed)


def _sample_and_load(
    config: Config, client: RolloutClient, prompts: Sequence[sample_pb2.Prompt]
) -> tuple[Sampled, str, Policy]:
    for left in reversed(range(ATTEMPTS)):
        sampled = sample(client, prompts, config.rollout.generate_timeout_seconds)
        try:
            path = find_weights(config, sampled.version, sampled.fingerprint)
            keep_routing = config.rl_stability.consistency.keep_routing
            policy = load_policy(
                path,
                dtype=config.model.dtype,
                keep_routing=keep_routing,
                attention=config.model.attention,
                device=plain_device(config),
            )
            return sampled, path, policy
        except (InvalidData, OSError) as error:
            if not left or getattr(error, "code", "weights_unknown") != "weights_unknown":
                raise
            log.warning("weights went while they were read", version=sampled.version, error=str(error))
    raise AssertionError("the last attempt returns or raises")


def _configured(config: Config, available: tuple[ReplayKind, ...]) -> tuple[ReplayKind, ...]:
    consistency = config.rl_stability.consistency
    switched: dict[ReplayKind, bool] = {
        "routing": consistency.keep_routing,
        "candidates": consistency.keep_sampling_mask,
    }
    return tuple(kind for kind in available if switched[kind])

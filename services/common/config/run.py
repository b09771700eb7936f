from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from redis.connection import parse_url

from services.common.config.addresses import is_ipv6
from services.common.config.base import Section
from services.common.config.sampling_limits import (
    MAX_GROUP_SIZE,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MIN_TEMPERATURE,
    as_float32,
)


class RunConfig(Section):
    """What the run is called, where it writes, and how often its processes are started again."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$",
        description="also the prefix of the run's Redis keys",
        examples=["my-run"],
    )
    seed: int = Field(
        0, ge=0, description="of the order of rows and of what is held out; rollouts mix it into seeds of their own"
    )
    directory: Path = Field(
        Path("runs"), description="everything that the run writes goes to a folder of its name in here"
    )
    restarts: int = Field(
        5, ge=0, description="how often `trivet up` starts one process again within restart_window_seconds"
    )
    restart_window_seconds: float = Field(3600.0, gt=0, description="restarts further back no longer count")

    @property
    def path(self) -> Path:
        return self.directory / self.name


class RedisConfig(Section):
    """The server that joins the services, and how its streams are consumed."""

    url: str | None = Field(
        None,
        repr=False,
        description="redis://, rediss:// or unix://; without it `trivet up` starts one",
        examples=["redis://:password@host:6379/0"],
    )
    retry_seconds: float = Field(60.0, gt=0, description="how long an unreachable server is retried before giving up")
    claim_idle_seconds: float = Field(15.0, gt=0, description="an entry untouched for so long is claimed by another")
    max_deliveries: int = Field(4, ge=1, description="an entry delivered more often goes to the dead letters")

    @field_validator("url")
    @classmethod
    def _scheme(cls, url: str | None) -> str | None:
        if url is None:
            return None
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("expected a redis://, rediss:// or unix:// address")
        try:
            parse_url(url)  # type: ignore[no-untyped-call]
        except ValueError:
            # The parser's own words hold parts of the password.
            raise ValueError(
                "expected redis://[[user]:password@]host[:port][/database], with special characters of user and "
                "password percent-encoded"
            ) from None
        return url


class BlobConfig(Section):
    """Where replay data lies between rollout and trainer."""

    url: str = Field(
        "redis",
        repr=False,
        description="'redis' for the run's Redis, or an fsspec address",
        examples=["s3://bucket/prefix"],
    )
    max_bytes: int = Field(64 * 2**20, gt=0, description="a larger blob is refused")
    ttl_seconds: int = Field(86_400, gt=0, description="after this, Redis drops a blob that nobody has fetched")


class ServerConfig(Section):
    """gRPC and HTTP of one service; port 0 takes a free one."""

    host: str = Field(
        "127.0.0.1", description="a name or an address, IPv6 too; 0.0.0.0 or :: for every address of the machine"
    )
    grpc_port: int = Field(
        0, ge=0, le=65535, description="of the gRPC API; 0 takes a free one, as `trivet up` always does"
    )
    http_port: int = Field(
        0, ge=0, le=65535, description="of /healthz, /readyz, /metrics and the admin API; 0 takes a free one"
    )
    token: str | None = Field(
        None, repr=False, min_length=16, description="what callers have to present; needed unless host is loopback"
    )

    @field_validator("host")
    @classmethod
    def _host(cls, host: str) -> str:
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not bare or any(character in " /[]" for character in bare) or (":" in bare and not is_ipv6(bare)):
            raise ValueError(f"is {host!r}, expected a name or an address without a port")
        return bare


class ModelConfig(Section):
    """The model to train, and how trainer and sampler compute it."""

    path: str = Field(description="a Hugging Face checkpoint: a directory or a hub id", examples=["models/quickstart"])
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="what the trainer and vLLM compute in; the optimizer keeps float32 copies"
    )
    max_length: int = Field(2048, gt=1, description="the most tokens of prompt and completion together")
    attention: Literal["auto", "sdpa", "eager", "varlen", "flash_attention_2"] = Field(
        "auto",
        description="the trainer's; auto is what transformers picks, varlen torch's flash kernel for packed samples, "
        "flash_attention_2 that of the package flash-attn; both need a GPU and bfloat16",
    )

    @model_validator(mode="after")
    def _attention(self) -> Self:
        if self.attention in {"varlen", "flash_attention_2"} and self.dtype == "float32":
            raise ValueError(
                f"attention is {self.attention!r} and dtype 'float32', expected bfloat16 or another attention: "
                "flash attention computes in half precision only"
            )
        return self


class SamplingConfig(Section):
    """How training samples are drawn. What the trainer cannot replay (penalties, logit bias, min-p) has no key."""

    group_size: int = Field(8, ge=1, le=MAX_GROUP_SIZE, description="samples per prompt")
    temperature: float = Field(
        1.0,
        ge=MIN_TEMPERATURE,
        le=MAX_TEMPERATURE,
        description="divides the logits; vLLM draws neither below nor above these bounds",
    )
    top_k: int = Field(
        0, ge=0, le=MAX_TOP_K, description="how many of the likeliest tokens are candidates; 0: every token"
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="share of probability that the candidates hold together; 1: every token"
    )
    max_tokens: int = Field(512, ge=1, description="tokens after which a completion is cut off")

    @field_validator("top_p")
    @classmethod
    def _same_in_float32(cls, top_p: float) -> float:
        carried = as_float32(top_p)
        if carried == 0 or (carried == 1 and top_p < 1):
            raise ValueError(
                f"is {top_p!r}, which is {carried:g} in float32, as prompts carry it: expected another value"
            )
        return top_p

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


class EvaluationConfig(Section):
    """Evaluation on the validation split, at the start, every `every` steps and at the end."""

    every: int = Field(10, ge=0, description="steps between evaluations; 0: only at the start and the end")
    prompts: int = Field(64, ge=1, description="how many held-out prompts (dpo: pairs), the first ones of their split")
    samples: int = Field(
        4,
        ge=0,
        le=MAX_GROUP_SIZE,
        description="sampled completions per prompt, in addition to the greedy one; 0 for none",
    )
    success_reward: float = Field(1.0, description="a reward of at least this counts as correct")
    timeout_seconds: float = Field(
        600.0, gt=0, description="no scored group for so long ends the run; the first waits for the rollouts' start"
    )

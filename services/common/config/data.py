from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from services.common.config.base import Section


class SourceConfig(Section):
    """Where prompts come from. Each row gives a prompt and, in its other fields, what the scorer needs."""

    kind: Literal["jsonl", "hf", "reasoning_gym"] = Field(
        description="a JSONL file, a dataset that the library datasets loads, or a task of reasoning-gym",
        examples=["jsonl"],
    )
    path: str = Field(
        description="JSONL file, dataset directory or hub id, or reasoning-gym task name", examples=["data/train.jsonl"]
    )
    split: str = Field("train", description="hf: the dataset's split")
    prompt_field: str = Field("prompt", description="the column that holds the prompt, a string")
    size: int | None = Field(None, gt=0, description="reasoning_gym: how many rows to make; else: how many to read")
    options: dict[str, Any] = Field(
        default_factory=dict, description="passed to the dataset's constructor", examples=[{"name": "main"}]
    )

    @model_validator(mode="after")
    def _complete(self) -> "SourceConfig":
        if self.kind == "jsonl" and not Path(self.path).suffix == ".jsonl":
            raise ValueError(f"path is {self.path!r}, expected a .jsonl file for kind jsonl")
        if self.kind == "reasoning_gym" and self.size is None:
            raise ValueError("size is missing: reasoning_gym makes rows, so it has to know how many")
        return self


class PreferenceSourceConfig(Section):
    """Where pairs of answers come from, of which one is preferred."""

    kind: Literal["jsonl", "hf"] = Field(
        description="a JSONL file, or a dataset that the library datasets loads", examples=["jsonl"]
    )
    path: str = Field(description="JSONL file, or dataset directory or hub id", examples=["data/pairs.jsonl"])
    split: str = Field("train", description="hf: the dataset's split")
    prompt_field: str = Field("prompt", description="the column that holds the prompt")
    chosen_field: str = Field("chosen", description="the column that holds the preferred answer")
    rejected_field: str = Field("rejected", description="the column that holds the other answer")
    size: int | None = Field(None, gt=0, description="how many rows to read")
    options: dict[str, Any] = Field(
        default_factory=dict, description="passed to the dataset's constructor", examples=[{"name": "main"}]
    )

    @model_validator(mode="after")
    def _complete(self) -> "PreferenceSourceConfig":
        if self.kind == "jsonl" and not Path(self.path).suffix == ".jsonl":
            raise ValueError(f"path is {self.path!r}, expected a .jsonl file for kind jsonl")
        return self


class DataConfig(Section):
    """What is trained on and what is held out, and how a row becomes a prompt."""

    train: SourceConfig | None = Field(None, description="prompts to sample; needed unless there are preferences")
    preferences: PreferenceSourceConfig | None = Field(
        None, description="pairs to learn from without sampling (dpo): neither rollout nor reward service is needed"
    )
    validation: SourceConfig | None = Field(None, description="without it, a share of train is split off")
    validation_ratio: float = Field(
        0.05, gt=0, lt=1, description="share of the rows held out where no validation source is given, at least one row"
    )
    shuffle: bool = Field(True, description="draw a new order of the training rows for each epoch, from run.seed")
    chat_template: bool = Field(True, description="wrap each prompt as a user message; else it is used as it stands")
    system_prompt: str | None = Field(None, description="a system message before each prompt; needs chat_template")
    max_prompt_tokens: int = Field(1024, ge=1, description="tokens that a prompt may have, template included")
    too_long: Literal["error", "drop"] = Field(
        "error", description="a prompt over max_prompt_tokens: refuse the data, or drop the row"
    )

    @model_validator(mode="after")
    def _one_source(self) -> "DataConfig":
        if (self.train is None) == (self.preferences is None):
            given = "neither is given" if self.train is None else "both are given"
            raise ValueError(f"{given}, expected either train (prompts to sample) or preferences (pairs)")
        if self.preferences is not None and self.validation is not None:
            raise ValueError("validation is given, expected none: a share of preferences is split off")
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError(
                "system_prompt is given while chat_template is false, expected one or the other: "
                "a prompt that is used as it stands has no place for it"
            )
        return self

    @property
    def prompts(self) -> SourceConfig:
        """Raises ValueError where the data are preferences."""
        if self.train is None:
            raise ValueError("data.train is missing, expected prompts to sample")
        return self.train

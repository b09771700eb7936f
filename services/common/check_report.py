"""What a service finds wrong with a configuration before anything is started."""

from pydantic import BaseModel, ConfigDict


class CheckReport(BaseModel):
    """`findings` are sentences, each with the key to change; none where the service could start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    findings: tuple[str, ...]

"""What a service finds wrong with a configuration before anything is started."""

from pydantic import BaseModel, ConfigDict


class CheckReport(BaseModel):
    """Sentences, each with the key to change: `findings` keep the service from starting, `doubts` do not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    findings: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the YAML: unknown keys are refused, and assignments are validated."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())

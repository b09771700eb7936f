"""Files of a run that one process writes and another reads."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, ValidationError

from services.common.errors import InvalidData
from services.common.run_files.atomic import write_atomically

# Step metrics were called values in files of earlier versions.
METRICS = AliasChoices("metrics", "values")


class Part(BaseModel):
    """Of a report. NaN and infinity survive, which JSON does not have."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), ser_json_inf_nan="strings")


class Report(Part):
    """A JSON file. `KIND` is what messages call it, `CODE` that of the error where a file is none."""

    KIND: ClassVar[str]
    CODE: ClassVar[str] = "report_unusable"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises InvalidData."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise InvalidData(cls.CODE, f"{path} is not {cls.KIND} ({error})") from error

    def write(self, path: Path) -> None:
        """Atomically; makes the directory. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.model_dump_json(indent=1) + "\n")

"""Puts the schema of the run's configuration into values.schema.json: `python deploy/k8s/values_schema.py`."""

import json
from pathlib import Path
from typing import Any

from services.common.config import Config

SCHEMA = Path(__file__).parent / "trivet" / "values.schema.json"


def with_config(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the definitions of the configuration as they are now; theirs begin with a capital."""
    config = Config.model_json_schema(ref_template="#/$defs/{model}")
    generated = config.pop("$defs")
    kept = {name: each for name, each in schema["$defs"].items() if name[0].islower()}
    return {**schema, "$defs": {**kept, "Config": config, **generated}}


def main() -> None:
    schema = with_config(json.loads(SCHEMA.read_text(encoding="utf-8")))
    SCHEMA.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

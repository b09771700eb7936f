"""Writes docs/configuration.md and configs/run.schema.json from the configuration's models: `make docs`."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from services.common.config import Config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "configuration.md"
SCHEMA = ROOT / "configs" / "run.schema.json"

ROLLOUT, REWARD, TRAINER, UP = "rollout", "reward", "trainer", "`trivet up`"
# Who reads a key or a whole section; the longest name counts.
READERS: dict[str, tuple[str, ...]] = {
    "run.name": (ROLLOUT, REWARD, TRAINER, UP),
    "run.seed": (ROLLOUT, TRAINER),
    "run.directory": (ROLLOUT, TRAINER, UP),
    "run.restarts": (UP,),
    "run.restart_window_seconds": (UP,),
    "prepare": (UP,),
    "redis": (ROLLOUT, REWARD, TRAINER),
    "redis.url": (ROLLOUT, REWARD, TRAINER, UP),
    "redis.retry_seconds": (ROLLOUT, REWARD, TRAINER, UP),
    "blobs": (ROLLOUT,),
    "blobs.url": (ROLLOUT, TRAINER),
    "model.path": (ROLLOUT, TRAINER),
    "model.dtype": (ROLLOUT, TRAINER),
    "model.max_length": (ROLLOUT,),
    "model.attention": (TRAINER,),
    "data": (TRAINER,),
    "sampling": (TRAINER,),
    "sampling.top_k": (ROLLOUT, TRAINER),
    "sampling.top_p": (ROLLOUT, TRAINER),
    "evaluation": (TRAINER,),
    "algorithm": (TRAINER,),
    "rl_stability": (TRAINER,),
    "rollout": (ROLLOUT,),
    "rollout.server.host": (ROLLOUT, UP),
    "rollout.server.token": (ROLLOUT, TRAINER, UP),
    "rollout.replicas": (UP,),
    "reward": (REWARD,),
    "reward.server.host": (REWARD, UP),
    "reward.replicas": (UP,),
    "reward.minimum": (REWARD, TRAINER),
    "reward.maximum": (REWARD, TRAINER),
    "reward.normalize": (REWARD, TRAINER),
    "reference": (TRAINER,),
    "trainer": (TRAINER,),
    "trainer.server.host": (TRAINER, UP),
    "trainer.server.token": (TRAINER, UP),
    "trainer.processes": (UP,),
    "trainer.steps": (TRAINER, UP),
    "trainer.collapse.evaluation_share": (TRAINER, UP),
    "trainer.batch_timeout_seconds": (ROLLOUT, REWARD, TRAINER),
    "trainer.stop_timeout_seconds": (UP,),
    "weights": (TRAINER,),
    "weights.transfer": (ROLLOUT, TRAINER),
    "weights.timeout_seconds": (ROLLOUT, TRAINER),
}
UNITS = {"_seconds": "seconds", "_bytes": "bytes", "_mib": "MiB", "_tokens": "tokens", "_steps": "steps"}
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "of length at least {}",
    "minItems": "of length at least {}",
    "maxItems": "at most {}",
    "pattern": "matching `{}`",
}
PREAMBLE = """\
# Configuration

One YAML configures a run, and every service reads the same file. `make docs` writes this page and
[configs/run.schema.json](../configs/run.schema.json) from the models in
[services/common/config](../services/common/config).

- An unknown key, a value out of bounds and a combination that cannot work are refused at load, in one sentence that
  names the key. `trivet check FILE` also looks at data, models, scorers and the machine.
- The environment comes after the file: `TRIVET__SECTION__KEY=value` sets `section.key`, and
  `TRIVET__SECTION__KEY__FILE=/path` sets it to the text of a file, as secrets come. `--set section.key=value` is last.
- `trivet config show FILE` prints what is in effect after all of that, defaults included and secrets hidden.
- An editor with the YAML language server completes and checks keys where a line of the file names the schema:
  `# yaml-language-server: $schema=run.schema.json`.

Each key has its type and bounds, its default, and who reads it: a service, or `trivet up`, which starts the services on
one machine. [Resuming](resuming.md) says what may change between two starts of a run.
"""


@dataclass(frozen=True)
class Key:
    """`schema` is the key's own; where a section stands, `section` is that of the section."""

    name: str
    schema: dict[str, Any]
    section: dict[str, Any] | None
    required: bool


def run_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of the whole configuration."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def keys(schema: dict[str, Any]) -> Iterator[Key]:
    """Every key in the order of the models, each section before what it holds; lists are written `name[]`."""
    yield from _keys(schema, schema["$defs"], "")


def _keys(section: dict[str, Any], definitions: dict[str, Any], prefix: str) -> Iterator[Key]:
    for name, schema in section["properties"].items():
        reference = _reference(schema)
        below = definitions[reference.rpartition("/")[2]] if reference else None
        path = f"{prefix}{name}" + ("[]" if reference and schema.get("type") == "array" else "")
        yield Key(path, schema, below, name in section.get("required", []))
        if below is not None:
            yield from _keys(below, definitions, f"{path}.")


def _reference(schema: dict[str, Any]) -> str | None:
    for each in (schema, schema.get("items", {}), *schema.get("anyOf", [])):
        if "$ref" in each:
            return str(each["$ref"])
    return None


def readers(name: str) -> tuple[str, ...]:
    """Raises KeyError for a key that nobody is known to read."""
    parts = name.replace("[]", "").split(".")
    for length in range(len(parts), 0, -1):
        if found := READERS.get(".".join(parts[:length])):
            return found
    raise KeyError(name)


def page() -> str:
    """Markdown, with lines of at most 120 characters."""
    every = list(keys(run_schema()))
    lines = [PREAMBLE]
    for section in every:
        if section.section is None:
            continue
        lines += [f"{'#' * (2 + section.name.count('.'))} `{section.name}`", ""]
        lines += [*_wrapped(" ".join(section.section["description"].split())), ""]
        if "description" in section.schema:
            lines += [*_entry(section, "", ""), ""]
        own = [key for key in every if key.section is None and key.name.rpartition(".")[0] == section.name]
        for key in own:
            lines += _entry(key, "- ", "  ")
        if own:
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _entry(key: Key, first: str, following: str) -> list[str]:
    name = f"`{key.name.rpartition('.')[2]}`"
    facts = f"{name}: {_kind(key)}. {_default(key)}. Read by {', '.join(readers(key.name))}."
    meaning = key.schema["description"]
    return [*_wrapped(facts, first, following, end="\\"), *_wrapped(meaning, following, following)]


def _kind(key: Key) -> str:
    """The type in words, with bounds and unit."""
    unit = next((unit for suffix, unit in UNITS.items() if key.name.endswith(suffix)), None)
    kinds = key.schema.get("anyOf", [key.schema])
    bounds = [words.format(kind[name]) for kind in kinds for name, words in BOUNDS.items() if name in kind]
    return ", ".join([" or ".join(map(_type, kinds)), *bounds, *([f"in {unit}"] if unit else [])])


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return "section"
    if "enum" in schema:
        return "one of " + ", ".join(f"`{each}`" for each in schema["enum"])
    if schema["type"] == "array":
        return f"list of {_type(schema['items'] if 'items' in schema else schema['prefixItems'][0])}s"
    if schema["type"] == "object":
        return "mapping"
    return "path" if schema.get("format") == "path" else str(schema["type"])


def _default(key: Key) -> str:
    empty: Any = {} if key.schema.get("type") == "object" else []
    default = "Required" if key.required else f"Default `{_yaml(key.schema.get('default', empty))}`"
    # Where the type tells all of the form, an example would say no more.
    evident = "enum" in key.schema or key.schema.get("type") in {"number", "integer"}
    examples = [] if evident else key.schema.get("examples", [])
    return default + "".join(f", for example `{_yaml(each)}`" for each in examples)


def _yaml(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
        .removesuffix("\n")
        .removesuffix("\n...")
    )


def _wrapped(text: str, first: str = "", following: str = "", end: str = "") -> list[str]:
    lines = textwrap.wrap(
        text, 119, initial_indent=first, subsequent_indent=following, break_long_words=False, break_on_hyphens=False
    )
    return [*lines[:-1], lines[-1] + end]


def main() -> None:
    SCHEMA.write_text(json.dumps(run_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

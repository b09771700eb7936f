"""The reference of the configuration and its schema are those of the models, and complete."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SCHEMA_LINE = "# yaml-language-server: $schema="


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("configuration_page", ROOT / "docs" / "configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads((ROOT / "configs" / "run.schema.json").read_text(encoding="utf-8"))


def test_page_and_schema_are_fresh(generator: ModuleType, schema: dict[str, Any]) -> None:
    assert schema == generator.run_schema(), "run: make docs"
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == generator.page(), "run: make docs"


def test_every_key_has_a_description_and_every_section_too(generator: ModuleType) -> None:
    undescribed = [
        key.name for key in generator.keys(generator.run_schema()) if not (key.section or key.schema).get("description")
    ]
    assert undescribed == []


def test_every_key_has_readers_and_none_are_named_for_a_key_that_is_not_there(generator: ModuleType) -> None:
    names = {key.name.replace("[]", "") for key in generator.keys(generator.run_schema())}
    for key in generator.keys(generator.run_schema()):
        if key.section is None:
            assert generator.readers(key.name), key.name
    assert generator.READERS.keys() - names == set()


def test_a_required_key_has_an_example(generator: ModuleType) -> None:
    keys = [key for key in generator.keys(generator.run_schema()) if key.required]
    assert keys
    assert [key.name for key in keys if not key.schema.get("examples")] == []


def test_every_key_is_on_the_page_with_lines_that_fit(generator: ModuleType) -> None:
    page = generator.page()
    for key in generator.keys(generator.run_schema()):
        wanted = f"# `{key.name}`" if key.section else f"- `{key.name.rpartition('.')[2]}`: "
        assert wanted in page, key.name
    assert max(map(len, page.splitlines())) <= 120


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_names_the_schema_and_is_valid(path: Path, schema: dict[str, Any]) -> None:
    text = path.read_text(encoding="utf-8")
    named = text.splitlines()[0]

    assert named.startswith(SCHEMA_LINE)
    assert (path.parent / named.removeprefix(SCHEMA_LINE)).resolve() == ROOT / "configs" / "run.schema.json"
    jsonschema.Draft202012Validator(schema).validate(yaml.safe_load(text))


@pytest.mark.parametrize(("section", "key", "value"), [("run", "colour", "red"), ("trainer", "steps", 0)])
def test_the_schema_refuses_what_the_models_refuse(schema: dict[str, Any], section: str, key: str, value: Any) -> None:
    tree = yaml.safe_load(CONFIGS[0].read_text(encoding="utf-8"))
    tree.setdefault(section, {})[key] = value

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(tree)

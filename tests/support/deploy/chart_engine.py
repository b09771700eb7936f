"""The chart, rendered by Helm's engine and checked against the schemas that an API server holds documents to."""

import copy
import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate.utils as kubernetes
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "k8s" / "trivet"
PRESETS = ("cpu", "single-node", "multi-node")
SERVICES = ("rollout", "reward", "trainer")
KUBERNETES = ("1.30", "1.33", "1.37")
CUSTOM = {"keda.sh/v1alpha1": "keda.v1alpha1", "monitoring.coreos.com/v1": "prometheus_operator.v1"}

Document = dict[str, Any]

# One file of definitions serves every document.
kubernetes.schema_contents = functools.cache(kubernetes.schema_contents)


@functools.cache
def chart() -> helm.Chart:
    return helm.Chart.load(CHART)


@functools.cache
def _preset(name: str) -> str:
    return (CHART / f"values-{name}.yaml").read_text(encoding="utf-8")


def preset(name: str, *changes: str) -> dict[str, Any]:
    """The preset's values, with each "path.to.key=YAML" set."""
    values: dict[str, Any] = yaml.load(_preset(name), Loader=yaml.CSafeLoader)
    for change in changes:
        path, _, value = change.partition("=")
        *parents, last = path.split(".")
        node = values
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = yaml.safe_load(value)
    return values


def render(values: dict[str, Any], name: str = "demo", namespace: str = "rl") -> list[Document]:
    """Every document; raises helm's HelmValuesError or HelmRenderError."""
    return copy.deepcopy(_render(json.dumps(values, sort_keys=True), name, namespace))


@functools.cache
def _render(values: str, name: str, namespace: str) -> list[Document]:
    rendered = chart().render(json.loads(values), name=name, namespace=namespace)
    texts = [text for path, text in sorted(rendered.items()) if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]


def named(documents: list[Document], kind: str, name: str) -> Document:
    found = [each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} documents are {kind} {name}"
    return found[0]


def kinds(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def pod_templates(documents: list[Document]) -> dict[str, Document]:
    """The pods of every workload, by component: metadata and spec."""
    found = {}
    for document in documents:
        pod = (
            document if document["kind"] == "Pod" else document["spec"].get("template") if "spec" in document else None
        )
        if pod is not None:
            found[pod["metadata"]["labels"]["app.kubernetes.io/component"]] = pod
    return found


def container(documents: list[Document], component: str) -> Document:
    containers: list[Document] = pod_templates(documents)[component]["spec"]["containers"]
    assert len(containers) == 1
    return containers[0]


def check(document: Document, version: str) -> None:
    """Raises ValidationError for a field that does not exist or has the wrong type, custom resources included."""
    if document["apiVersion"] in CUSTOM:
        getattr(_models(CUSTOM[document["apiVersion"]]), document["kind"]).model_validate(document)
    else:
        kubernetes.validate(document, version, strict=True)


@functools.cache
def _models(module: str) -> Any:
    package, name = module.split(".")
    pydantic_base = importlib.import_module("cloudcoil.pydantic").BaseModel
    # Only the models in use are built, of thousands; and an unknown key is an error.
    pydantic_base.model_config |= {"defer_build": True, "extra": "forbid"}
    (folder,) = importlib.util.find_spec(f"cloudcoil.models.{package}").submodule_search_locations
    # By its file: the package would bring versions that the chart does not use.
    spec = importlib.util.spec_from_file_location(f"{package}_{name}", Path(folder) / f"{name}.py")
    models = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = models
    spec.loader.exec_module(models)
    return models

"""The axes that shapes in signatures name are those that the page about the architecture lists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SECTION = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\n## Axes\n")[2]
LISTED = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", SECTION, re.MULTILINE)))
MODULES = [
    path
    for folder in ("services", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "from jaxtyping import" in path.read_text(encoding="utf-8")
]


def shapes(tree: ast.Module) -> Iterator[str]:
    """The strings of all annotations such as Float[Tensor, "tokens hidden"]."""
    nodes = list(ast.walk(tree))
    kinds = {
        name.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"
        for name in node.names
    }
    for node in nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in kinds:
            assert isinstance(node.slice, ast.Tuple), ast.unparse(node)
            yield ast.literal_eval(node.slice.elts[1])


def axes(shape: str) -> set[str]:
    """Without jaxtyping's marks: *variadic, #broadcast, ?of each leaf, _for documentation alone; 2+bins counts too."""
    return {name for name in (word.lstrip("_") for word in re.findall(r"[A-Za-z_]\w*", shape)) if name}


def test_each_axis_is_listed_once() -> None:
    assert len(LISTED) > 10
    assert sorted(LISTED) == sorted(set(LISTED))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_names_only_listed_axes(path: Path) -> None:
    named = {axis for shape in shapes(ast.parse(path.read_text(encoding="utf-8"))) for axis in axes(shape)}
    assert named <= set(LISTED)


def test_no_axis_is_listed_for_nothing() -> None:
    named = [axes(shape) for path in MODULES for shape in shapes(ast.parse(path.read_text(encoding="utf-8")))]
    assert set(LISTED) - set().union(*named) == set()


def test_marks_are_not_part_of_a_name() -> None:
    assert axes("1 *shape #tokens _sums 2+bins _ ...") == {"shape", "tokens", "sums", "bins"}

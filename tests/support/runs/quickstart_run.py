"""The quickstart's configuration over a model and data that are there."""

from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).parents[3] / "configs"


def quickstart_tree(model: Path, name: str = "quickstart") -> dict[str, Any]:
    """That of configs/`name`.yaml, with nothing left to prepare: model and rows are in the folder `model`."""
    tree: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    del tree["prepare"]
    tree["model"]["path"] = str(model)
    for rows in tree["data"].values():
        if isinstance(rows, dict) and "path" in rows:
            rows["path"] = str(model / Path(rows["path"]).name)
    return tree

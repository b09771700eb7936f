"""What is started as `python -m services.…` is there: nothing else would notice a module that moved."""

import re
from importlib.util import find_spec
from pathlib import Path

import services

NAMED = re.compile(r'"(services(?:\.[a-z_]+)+)"')


def test_modules_that_are_named_in_strings_exist() -> None:
    root = Path(services.__file__).parent
    named = {name for path in root.rglob("*.py") for name in NAMED.findall(path.read_text(encoding="utf-8"))}
    assert {"services.trainer.rerun", "services.trainer.compare", "services.trainer.audit"} <= named
    assert [name for name in sorted(named) if find_spec(name) is None] == []

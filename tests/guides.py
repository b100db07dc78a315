"""Extracts the code blocks of the guides, so that tests run them unchanged."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType


def block(page: Path, name: str) -> str:
    """Returns the Python block after `<!-- name -->` of a page."""
    found = re.search(
        rf"<!-- {name} -->\n```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None, f"{page} has no block {name}"
    return found[1]


def load_example(page: Path, path: Path) -> ModuleType:
    """Writes a page's example to a file of its own, and imports it from there."""
    path.write_text(block(page, "example"), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""Builds the documentation site: `sphinx-build -W -c docs . build/site` in the repository's root.

The source folder is the repository, so that pages stay where their readers on a code host look for
them and their links work in both places.
"""

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(ROOT))

from sketchwalk_jax import __version__  # noqa: E402

project = "sketchwalk-jax"
copyright = "the authors of sketchwalk-jax"
release = __version__
html_title = f"sketchwalk-jax {release}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "*.md",
    "benchmarks/*.md",
    "benchmarks/appendix/*.md",
    "models/README.md",
    "models/sketchwalk_8m/README.md",
    "notebooks/*.ipynb",
    "pallas_kernels/README.md",
    "sketchwalk_jax/policies/README.md",
    "training/README.md",
]
exclude_patterns = [".venv", "build", "**/.*"]

html_theme = "furo"
html_show_copyright = False
templates_path: list[str] = []

# Notebooks are shown as they were built; `notebooks/build.py` runs them.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "dollarmath", "fieldlist"]
myst_heading_anchors = 4
# A picture or link to a file that is not a page (a module, a folder) is for readers of the
# repository; the test of links says whether the file is there.
suppress_warnings = ["myst.xref_missing", "myst.header", "misc.highlighting_failure"]

default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def mark_code(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Makes indented code behind a line that ends with a colon and an empty one a literal block."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    for number in range(len(lines) - 2):
        line, empty, code = lines[number : number + 3]
        if line.endswith(":") and not empty.strip() and indent(code) > indent(line):
            lines[number] = line + ":"


def setup(app: Any) -> None:
    """Runs before the docstrings' sections are read."""
    app.connect("autodoc-process-docstring", mark_code, priority=100)

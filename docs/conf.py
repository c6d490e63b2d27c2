"""Configuration of the documentation site. `make docs` builds it into build/docs."""

from __future__ import annotations

import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_extensions")]

import distributed  # noqa: E402 - the checkout, found by the path above

project = "distributed"
author = "the authors of distributed"
copyright = author  # noqa: A001 - Sphinx reads this name
version = release = distributed.__version__

extensions = [
    "sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "sphinx_copybutton", "sphinx_design",
    "outside_links", "reference_tables", "command_line",
]  # fmt: skip
exclude_patterns = ["_extensions", "_static"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = [
    "toc.empty_glob",  # a toctree of a directory may have no page yet
    "myst.header",  # CHANGELOG.md and the pages of other directories keep their own levels of headings
]

# Docstrings are Google's style, with names in single backticks.
default_role = "literal"
smartquotes = False  # texts are shown as they are written
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "distributed"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_use_index = False
html_theme_options = {
    "logo": {"text": "distributed"},
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": [], "reference/settings": []},  # a wide table
    "footer_start": ["theme-version"],
    "footer_end": [],
    "back_to_top_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}
html_sidebars = {"index": [], "faq": [], "glossary": [], "troubleshooting": [], "start": []}

copybutton_prompt_text = "$ "


def setup(app: Sphinx) -> None:
    """Correct two texts of Sphinx: a dash and the default of a field of a dataclass."""
    app.connect("doctree-read", _draw_dashes)
    app.connect("autodoc-process-signature", _show_factories)


def _draw_dashes(app: Sphinx, doctree: nodes.document) -> None:
    """Draw the dash between an argument and its text, which `smartquotes` would draw in all texts, flags included."""
    for text in [each for each in doctree.findall(nodes.Text) if each == " -- "]:
        text.parent.replace(text, nodes.Text(" – "))  # noqa: RUF001


def _show_factories(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show `...` for `default_factory`. `<factory>` is no Python, and Sphinx shows such a signature as one long word."""
    return signature and signature.replace("<factory>", "..."), returns

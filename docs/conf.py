"""The documentation site: `make docs` builds it into `build/docs`; GitHub also shows the Markdown pages."""

import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

project = "zeus-plugins"
version = release = version_of(project)
html_title = f"{project} {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
# Docstrings put names of Python objects between single backticks.
default_role = "py:obj"

# Links to headings have the form that GitHub uses: `page.md#the-heading`.
myst_heading_anchors = 4
# Links to folders of the repository work on GitHub; on the site they are plain text, without a warning.
nitpick_ignore_regex = [("myst", r"\.\./.*")]

# Blocks without a language are console output, not Python.
highlight_language = "text"

html_theme = "furo"
# The pages load nothing from the network, so that the site can be opened from a folder, offline.
html_copy_source = False
html_static_path = ["static"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_css_files = ["site.css"]
html_logo = html_favicon = "static/logo.svg"
html_theme_options = {
    "source_repository": "https://github.com/zeus-plugins/zeus-plugins",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_show_sphinx = html_show_copyright = False

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autoclass_content = "both"  # the constructors describe the arguments, and callbacks inherit them


# Pages for maintainers, and the long list of changes, would hide users' pages among the results of a search.
UNSEARCHED = ("architecture", "internals", "matrix", "policy-figures", "policy-custom", "benchmarks", "changelog")

LOADED = re.compile(
    r"""<(?:script|link|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|srcset|href|data)=["'](?:https?:)?//[^>]*>"""
    r"""|(?:url\(|@import\s)\s*["']?(?:https?:)?//[^)"';]*"""
)


def check_that_nothing_is_loaded_from_elsewhere(app: Sphinx, error: Exception | None) -> None:
    """Raise an error if a page asks a network for a script, a style, a font or a picture."""
    if error is not None:
        return
    files = [path for path in Path(app.outdir).rglob("*") if path.suffix in {".html", ".css"}]
    found = [f"{path.name}: {asked}" for path in files for asked in LOADED.findall(path.read_text(encoding="utf-8"))]
    if found:
        raise ExtensionError("the site must open without a network, and loads " + "; ".join(sorted(set(found))))


def leave_out_of_search(_: Sphinx, environment: BuildEnvironment) -> None:
    """Mark the pages that the search leaves out."""
    for page in UNSEARCHED:
        environment.metadata[page]["no-search"] = ""


def setup(app: Sphinx) -> dict[str, Any]:
    """Show Mermaid diagrams as text: the script that draws them would have to be loaded from the network."""
    app.add_lexer("mermaid", TextLexer)
    app.connect("env-updated", leave_out_of_search)
    app.connect("build-finished", check_that_nothing_is_loaded_from_elsewhere)
    return {"parallel_read_safe": True}

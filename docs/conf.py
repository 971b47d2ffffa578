"""The configuration of the documentation site, which `make docs` builds into build/site."""

from __future__ import annotations

import re

from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

from bytecheckpoint.version import VERSION

project = "bytecheckpoint"
author = "The bytecheckpoint authors"
version = release = VERSION

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
]
html_theme = "furo"
html_title = f"bytecheckpoint {VERSION}"
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"
highlight_language = "text"  # indented blocks are commands and their output
smartquotes = False  # they would change `--json` in the help of commands
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

# The pages link to headings of one another, as they do in the repository.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "colon_fence"]

# What the repository's host shows of a picture. The site's scheme may differ from that of the reader's system.
PICTURE = re.compile(
    r'<picture>\s+<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">'
    r'\s+<img src="(?P<light>[^"]+)"\s+alt="(?P<alt>[^"]+)">\s+</picture>'
)

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88

# The build needs no network: these inventories list the few names that signatures contain.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.txt"),
}
# Types inside the library, which no user makes or looks into.
nitpick_ignore_regex = [
    ("py:class", r"bytecheckpoint\.(checkpoint\.location\.Silence|frameworks\.data_loader\.Divisible|.*\.T)"),
    ("py:class", r"bytecheckpoint\.((control|engine|format|frameworks\.layout|tensors)\..*|rules\.kinds\.Rule)"),
    ("py:class", r"typing_extensions\.Buffer"),
    ("py:class", r".*(\[| \| ).*"),  # a part of a long annotation, which Sphinx does not take apart
]
MADE_BY_THE_LIBRARY = {"Checkpoint", "LoadReport", "SaveHandle", "SaveResult", "StoredTensor", "Timings"}
MADE_BY_THE_LIBRARY |= {"VerifyReport", "Work"}


def by_scheme(_app: Sphinx, page: str, source: list[str]) -> None:
    """Let the theme choose between the two files of a picture."""
    source[0] = PICTURE.sub(r"![\g<alt>](\g<light>){.only-light} ![\g<alt>](\g<dark>){.only-dark}", source[0])
    if "<picture>" in source[0]:
        getLogger(__name__).warning("a picture is not written as PICTURE in conf.py expects it", location=page)


def without_epilog(_app: Sphinx, _context: object, lines: list[str]) -> None:
    """Leave out what the help of each command repeats: the exit codes, which docs/cli.md has as a table."""
    lines.clear()


def without_constructor(
    _app: Sphinx, what: str, name: str, _object: object, _options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Leave out the parameters of classes that users get from functions and never call."""
    is_made = what == "class" and name.rpartition(".")[2] in MADE_BY_THE_LIBRARY
    return ("", None) if is_made else (signature, returns)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", by_scheme)
    app.connect("autodoc-process-signature", without_constructor)
    app.connect("sphinx-click-process-epilog", without_epilog)

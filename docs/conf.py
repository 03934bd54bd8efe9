"""The documents as a site: `make docs`. Sphinx reads Markdown by MyST; everything is built offline."""

from noloco_node import __version__

project = "noloco_node"
author = "The noloco_node contributors"
release = __version__
extensions = ["myst_parser"]
include_patterns = ["docs/*.md", "research/*.md", "docker/*.md", "*.md"]
root_doc = "docs/index"
html_theme = "furo"
html_title = f"noloco_node {release}"
myst_heading_anchors = 4
# Documents link to code, which is no part of the site.
suppress_warnings = ["myst.xref_missing", "myst.header"]

"""Add the pages that are made from the code to the site: mkdocs calls this (see mkdocs.yml)."""

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from website.fetched import fetched
from website.pages import PAGES

SHIM = "https://unpkg.com/iframe-worker/shim"  # what the theme loads so that the search works from file://


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each generated page to the site's files."""
    for path, text in PAGES.items():
        if hand_written := files.get_file_from_path(path):
            files.remove(hand_written)  # its text is in the generated one
        files.append(File.generated(config, path, content=text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the name of a file above its block: "```python rewards.py" in the text."""
    return re.sub(r"^```(\w+) (\S+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take our own script for a search from file://, where the theme fetches one.

    Raises PluginError: the page fetches something from elsewhere; the site is read without a network.
    """
    output = output.replace(SHIM, get_relative_url("assets/file_worker.js", page.url))
    if foreign := fetched(output):
        raise PluginError(f"{page.url}: fetches {', '.join(foreign)}; a page of this site needs no network")
    return output

"""Add the pages that are made from the code to the site: mkdocs calls this (see mkdocs.yml)."""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from website.pages import PAGES


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each generated page to the site's files."""
    for path, text in PAGES.items():
        if hand_written := files.get_file_from_path(path):
            files.remove(hand_written)  # its text is in the generated one
        files.append(File.generated(config, path, content=text()))
    return files

"""Comparison of model folders, byte by byte."""

import json
from pathlib import Path

from pipeline.files import OURS


def assert_same_folder(mine: Path, theirs: Path) -> None:
    """All files are equal, and the settings but for the folder and the data type that the model was saved in."""
    files = [{path.relative_to(top): path for path in top.rglob("*") if path.is_file()} for top in (mine, theirs)]
    assert files[0].keys() == files[1].keys() and len(files[0]) > 5
    for name, path in files[0].items():
        if name.name == OURS:
            settings = [json.loads(found[name].read_text()) for found in files]
            for one in settings:
                assert one["run"].pop("output_dir") and one["run"].pop("save_dtype")
            assert settings[0] == settings[1]
        else:
            assert path.read_bytes() == files[1][name].read_bytes(), name

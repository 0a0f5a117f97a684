"""Chromium without a window, if the machine has one: the page that it makes of a file, and a picture of it."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

# The Debian package's script before the program takes settings of a desktop from the environment.
PROGRAMS = ("/usr/lib/chromium/chromium", "chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0")


def browser() -> str:
    """Return the program; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip("no chromium: apt-get install --no-install-recommends chromium")
    return found


def call(page: Path, *flags: str, width: int, height: int) -> subprocess.CompletedProcess[str]:
    """Open a page in a window of this size."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser(), *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        done = subprocess.run(
            [*command, *flags, page.resolve().as_uri()], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    return done


def document(page: Path, *, width: int = 1200, height: int = 900) -> tuple[str, list[str]]:
    """Return the document as the browser understands it, and the lines of its console."""
    done = call(page, "--dump-dom", width=width, height=height)
    return done.stdout, re.findall(r".*CONSOLE.*", done.stderr)


def picture(page: Path, file: Path, *, width: int, height: int, is_dark: bool = False) -> Path:
    """Write a picture of a page; return its file."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    call(page, f"--screenshot={file}", *scheme, width=width, height=height)
    return file

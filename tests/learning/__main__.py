"""`python tests/learning COMMAND ...`, from any folder."""

import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# This folder's own names would stand before installed packages' ones.
sys.path[:] = [str(TESTS.parent), str(TESTS), *(path for path in sys.path if Path(path) != TESTS / "learning")]

sys.exit(importlib.import_module("learning.run").main())

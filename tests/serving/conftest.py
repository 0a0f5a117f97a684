"""A server of tiny models, started by its command line; and its page in Chromium, which shows canned answers."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from support.canned_server import TOKEN, Canned, running
from support.canned_server import served as canned
from support.scripted_model import TEXT, random_model, save, scripted_model, tiny_config
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
EXPECTED_ERRORS = ("401 (Unauthorized)", "429 (Too Many Requests)", "500 (Internal Server Error)")


@dataclass(frozen=True, slots=True)
class Served:
    """A running server.

    url: its address, without a path.
    token: what it printed.
    folder: of its models and votes.
    process: the command.
    """

    url: str
    token: str
    folder: Path
    process: subprocess.Popen[str]

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"} | headers, timeout=60)

    def post(self, path: str, **body: object) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)

    @property
    def num_answers(self) -> int:
        """Answers that run or wait."""
        with self.client() as client:
            return int(re.search(r"^rlhf_answers (\d+)$", client.get("/metrics").text, re.MULTILINE)[1])  # type: ignore[index]


def reward_model(bpe_folder: Path, folder: Path) -> str:
    torch.manual_seed(0)
    config = tiny_config()
    config.num_labels = 1
    return save(LlamaForSequenceClassification(config), bpe_folder, folder)


def started(words: list[str], folder: Path) -> Served:
    """Start `rlhf serve` with these words in `folder`, and wait until it serves."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rlhf.serve", *words, "--port", "0"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        if match := re.match(r"(http://\S+)/#token=(\S+) ", line):
            return Served(match[1], match[2], folder, process)
        printed += line
    raise AssertionError(printed)


@pytest.fixture(scope="session")
def models(bpe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: `speaking` answers TEXT, `endless` never ends, `random` is random, `judge` scores."""
    folder = tmp_path_factory.mktemp("models")
    scripted_model(bpe_folder, folder / "speaking", TEXT)
    scripted_model(bpe_folder, folder / "endless", "ab", ends=False, num_positions=100_000)
    # No row of the vocabulary without a token: lm_eval and transformers would draw it, and the sampler does not.
    random_model(bpe_folder, folder / "random", vocab_size=len(PreTrainedTokenizerFast.from_pretrained(bpe_folder)))
    reward_model(bpe_folder, folder / "judge")
    return folder


@pytest.fixture(scope="session")
def served(models: Path) -> Iterator[Served]:
    """A server of all four models, with two slots each and room for two answers that wait."""
    words = ["speaking", "endless", "random", "judge", "--max-requests", "4", "--max-waiting", "0"]
    server = started(words, models)
    yield server
    server.process.terminate()
    server.process.wait(30)


@pytest.fixture
def started_server() -> Iterator[Callable[[list[str], Path], Served]]:
    """Start a server with words in a folder; it ends with the test."""
    servers: list[Served] = []

    def start(words: list[str], folder: Path) -> Served:
        servers.append(started(words, folder))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait(30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    library = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium: apt-get install --no-install-recommends chromium")
    with library.sync_playwright() as started:
        program_run = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield program_run
        program_run.close()


@pytest.fixture
def state() -> Canned:
    return canned("sft", "actor")


@pytest.fixture
def opened(browser: Any, state: Canned) -> Iterator[Any]:
    """Open the page with its token; at the end no script has failed and nothing was blocked."""
    faults: list[str] = []
    with running(state) as address, browser.new_context(viewport={"width": 1300, "height": 850}) as context:
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
        page.goto(f"{address}#token={TOKEN}")
        page.wait_for_selector("#chat:visible")
        yield SimpleNamespace(page=page, address=address)
    assert [fault for fault in faults if not fault.endswith(tuple(f"status of {one}" for one in EXPECTED_ERRORS))] == []


@pytest.fixture
def page(opened: Any) -> Any:
    return opened.page

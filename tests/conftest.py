"""Fixtures that several test files share: no download, nothing large."""

import functools
import gc
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread for each of pytest's workers
os.environ["RLHF_REPORT"] = "false"  # of the runs of tests: those of reports turn it on

import pytest
from support import kernel_mode  # noqa: F401  before the first import of triton
from support.frozen import freeze
from support.in_process import group_of_one
from support.real_tokenizers import load_opt_tokenizer
from support.tiny_models import NAMES, save_tiny
from support.tiny_run import make_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2TokenizerFast, LlamaTokenizerFast, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# A shell starts background jobs with SIGINT ignored, which the processes of a test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

TRAINING_TEXT = (
    "\n\nHuman: What is the capital of France?\n\nAssistant: The capital of France is Paris.",
    "\n\nHuman: How do I make tea?\n\nAssistant: Boil water, add the leaves and wait for four minutes.",
    "The quick brown fox jumps over the lazy dog. Sphinx of black quartz, judge my vow.",
)


# Files that take minutes, longest first: a worker that gets one of them at the end would work on alone. Those of GPUs
# are first, so that each of their shards gets two.
LONG = (
    "gpu/test_cuda_automatic.py", "gpu/test_cuda_resume.py", "gpu/test_cuda_memory.py", "gpu/test_cuda_fused_steps.py",
    "gpu/test_cuda_options.py", "gpu/test_cuda_small_gpu.py",
    "models/test_families.py", "project/test_demo.py", "launching/test_train_runs.py", "models/test_real_checkpoint.py",
    "faults/test_ranks_ending.py", "multi/test_ranks_ppo.py", "data/test_real_data.py", "faults/test_resume_changed.py",
    "checkpoints/test_resume.py", "faults/test_kill.py", "generation/test_generator.py", "multi/test_ranks_sft.py",
    "project/test_bench.py", "step1_sft/test_step_1.py", "multi/test_ranks_decode.py", "multi/test_ranks_reward.py",
    "multi/test_ranks_streaming.py", "rlhf/test_install.py", "generation/test_generation_runs.py",
    "multi/test_ranks_checkpoint.py", "generation/test_slot_sampling.py", "generation/test_family_tokens.py",
    "launching/test_launcher.py", "launching/test_train.py", "faults/test_input_corpus.py",
    "faults/test_security_names.py", "launching/test_launch.py",
)  # fmt: skip


# Test marked `few` -> its cases that `make test` runs.
FEW: dict[str, list[str]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="K/N: the K-th of N parts of the files (of faults: of the tests)")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark slow the cases of a test after the first n that have no other mark: `@pytest.mark.few(n)`."""
    if (few := item.get_closest_marker("few")) is None or any(map(item.get_closest_marker, ("slow", "faults"))):
        return
    taken = FEW.setdefault(item.nodeid.partition("[")[0], [])
    if item.name in taken:
        return
    if len(taken) < few.args[0]:
        taken.append(item.name)
    else:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # after -m has selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files that take longest first; leave out those of other shards."""

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(Path(__file__).parent).as_posix()
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place)
    number, count = map(int, config.getoption("--shard").split("/"))

    def unit(item: pytest.Item) -> object:
        return item.nodeid if item.get_closest_marker("faults") else item.path

    def shard(place: int) -> int:
        """1 to N, then N to 1, and so on: the first files take longest, and one shard must not get all of them."""
        turn, rest = divmod(place, count)
        return count - rest if turn % 2 else rest + 1

    mine = {one for place, one in enumerate(dict.fromkeys(map(unit, items))) if shard(place) == number}
    config.hook.pytest_deselected(items=[item for item in items if unit(item) not in mine])
    items[:] = [item for item in items if unit(item) in mine]


def pytest_collection_finish() -> None:
    freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries complain of what is not freed at the end


@pytest.fixture(scope="module", autouse=True)
def frozen_libraries() -> Iterator[None]:
    """Freeze what a file has imported before the next one runs."""
    yield
    freeze()


@pytest.fixture(scope="module", autouse=True)
def forgotten_models() -> Iterator[None]:
    """Forget what a plan remembers of models by their names: a folder of the next file may have the same one."""
    yield
    if measurement := sys.modules.get("pipeline.planning.measurement"):
        for cached in [value for value in vars(measurement).values() if hasattr(value, "cache_clear")]:
            cached.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def search_path() -> Iterator[None]:
    """Restore `sys.path`: a user's file that a test loads adds its folder, which may hold a `launch` of its own."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """The world of a process group of the test's own process alone."""
    with group_of_one() as joined:
        yield joined


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data and tokenizers that RLHF_TEST_DATA names."""
    folder = os.environ.get("RLHF_TEST_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("set RLHF_TEST_DATA to the folder with the real data (preference/, instruct/, tokenizers/, ...)")
    return Path(folder)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct below the one that RLHF_TEST_MODELS names."""
    folder = Path(os.environ.get("RLHF_TEST_MODELS", "")) / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        pytest.skip("set RLHF_TEST_MODELS to the folder with smollm2-135m-instruct/, a Hugging Face folder")
    return folder.resolve()


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved byte-level BPE tokenizer: <pad> 0, <s> 1, </s> 2, <unk> 3, no BOS added, no template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    folder = tmp_path_factory.mktemp("bpe")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def bpe_tokenizer(bpe_folder: Path) -> PreTrainedTokenizerBase:
    """A fresh copy of the tokenizer in `bpe_folder`, free to be given a template."""
    return PreTrainedTokenizerFast.from_pretrained(bpe_folder)


@pytest.fixture(params=["gpt2", "opt", "mistral-v1", "llm-jp-v2.1-50k"])
def real_tokenizer(request: pytest.FixtureRequest, real_data: Path) -> PreTrainedTokenizerBase:
    """Each published tokenizer in turn, as its model uses it, free to be given a template."""
    folder = real_data / "tokenizers" / request.param
    if request.param == "gpt2":
        return GPT2TokenizerFast.from_pretrained(folder)
    if request.param == "opt":
        return load_opt_tokenizer(folder)
    if importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("transformers reads a SentencePiece tokenizer.model only with the sentencepiece package")
    return LlamaTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_folders(bpe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of tiny_models.NAMES -> folder of a causal language model; "<name>-reward" -> of a reward model."""
    parent = tmp_path_factory.mktemp("tiny")
    return {
        f"{name}{kind}": save_tiny(name, bpe_folder, parent / f"{name}{kind}", reward=bool(kind))
        for name in NAMES
        for kind in ("", "-reward")
    }


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder that `make_folder` creates with these sizes, once for all tests: nothing writes into it."""
    return functools.cache(lambda **sizes: make_folder(tmp_path_factory.mktemp("tiny-run"), **sizes))


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest, tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The test file's own copy of a tiny folder; the constant FOLDER_SIZES of the file holds its sizes."""
    own = tmp_path_factory.mktemp("folder")
    return shutil.copytree(tiny_folder(**getattr(request.module, "FOLDER_SIZES", {})), own, dirs_exist_ok=True)


@pytest.fixture(params=NAMES)
def causal_folder(request: pytest.FixtureRequest, tiny_folders: dict[str, str]) -> str:
    """The folder of each tiny causal language model in turn."""
    return tiny_folders[request.param]


@pytest.fixture(params=NAMES)
def reward_folder(request: pytest.FixtureRequest, tiny_folders: dict[str, str]) -> str:
    """The folder of each tiny reward model in turn."""
    return tiny_folders[f"{request.param}-reward"]

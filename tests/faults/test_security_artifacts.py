"""Files that want to run code: each tries to make a marker file, through the commands that read it, and none does."""

import json
import os
import pickle
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from broken_models import WEIGHTS, adapter, config, template, text, tokenizer
from input_calls import call, stage_words

from pipeline.data import templates
from pipeline.processes import BYTES_OF_THREADS, memory_limit

FOLDER_SIZES = {"num_train": 12, "num_test": 2}
Plant = Callable[[Path, Path], object]  # (the folder to spoil, the marker that must not appear)
SECRET = "s3cret-in-another-file"
SLOW_S = 0.3


class Trap:
    """Makes the marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


class Artifact(NamedTuple):
    """What is planted where, which command reads it by which flag, and how that ends ("" for nothing said)."""

    plant: Plant
    command: str
    flag: str
    code: int
    says: str
    source: str = "base"


def pickled(*files: str, instead_of: str = WEIGHTS) -> Plant:
    """torch.save of a trap in each file; the good weights are taken away."""

    def plant(folder: Path, marker: Path) -> None:
        if instead_of:
            (folder / instead_of).unlink()
        for file in files:
            torch.save({"weight": Trap(marker)}, folder / file)

    return plant


def scripted(folder: Path, marker: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.jit.save(torch.jit.script(torch.nn.Identity()), str(folder / "pytorch_model.bin"))


def raw_pickle(file: str) -> Plant:
    return lambda folder, marker: (folder / file).write_bytes(pickle.dumps(Trap(marker)))


def after(*plants: Plant) -> Plant:
    return lambda folder, marker: [plant(folder, marker) for plant in plants]


def change(what: Callable[[Path], object]) -> Plant:
    return lambda folder, marker: what(folder)


def script(name: str) -> Plant:
    """A Python file that makes the marker when it is imported."""
    return lambda folder, marker: (folder / name).write_text(f"import os\nos.mkdir({str(marker)!r})\n")


def only(name: str, content: Callable[[Path], bytes]) -> Plant:
    """A folder with one file."""

    def plant(folder: Path, marker: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_bytes(content(marker))

    return plant


def pickled_adapter(file: str) -> Plant:
    def plant(folder: Path, marker: Path) -> None:
        adapter(base_model_name_or_path=str(folder.parent / "good"), target_modules=["q_proj"])(folder)
        torch.save({"weight": Trap(marker)}, folder / file)

    return plant


def saved_set(**changes: Any) -> Plant:
    """A save_to_disk folder whose description says something else."""

    def plant(folder: Path, marker: Path) -> None:
        shutil.rmtree(folder)
        datasets.Dataset.from_list([{"prompt": "a", "response": "b"}]).save_to_disk(folder)
        file = folder / "dataset_info.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        (folder / "state.pkl").write_bytes(pickle.dumps(Trap(marker)))

    return plant


def linked(name: str) -> Plant:
    """A link out of the folder, to a file that the user did not mean to give."""

    def plant(folder: Path, marker: Path) -> None:
        (folder.parent / "secret").write_text(SECRET)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder.parent / "secret")

    return plant


def jinja(code: str) -> Plant:
    return lambda folder, marker: template(code.replace("MARKER", str(marker)))(folder)


REMOTE = {"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"}
KERNEL = "evil-org/kernel"
YAML = "seed: !!python/object/apply:os.mkdir [MARKER]"
INDEX = '{"weight_map": {"weight": "pytorch_model-1.bin"}}'
ESCAPE = "{{ cycler.__init__.__globals__.os.mkdir('MARKER') }}"
SUBCLASSES = "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{{ c }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
CONSTANT = "{% if 0 %}{{ 7**(10**8) }}{% endif %}{{ messages }}"  # jinja computes it, and passes over what is raised
DOUBLING = "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"
LOUD = "{{ messages[0].content }}{{ messages[-1].content }}{% for i in range(99999) %}xxxx{% endfor %}"
MODEL, ACTOR, CRITIC = "model_name_or_path", "actor_model_name_or_path", "critic_model_name_or_path"

ARTIFACTS: dict[str, Artifact] = {
    "weights in .bin, step 1": Artifact(pickled("pytorch_model.bin"), "sft", MODEL, 2, "holds more than tensors"),
    "weights in .bin, step 2": Artifact(pickled("pytorch_model.bin"), "reward", MODEL, 2, "holds more than tensors"),
    "weights in .bin, chat": Artifact(pickled("pytorch_model.bin"), "chat", "path", 2, "holds more than tensors"),
    "weights in .bin, TorchScript": Artifact(scripted, "sft", MODEL, 2, "is TorchScript or an old archive"),
    "weights in shards of .bin": Artifact(
        after(pickled("pytorch_model-1.bin"), change(text("pytorch_model.bin.index.json", INDEX))),
        "sft", MODEL, 2, "cannot load the model",
    ),
    "weights in .pt": Artifact(pickled("model.pt", "model.ckpt"), "sft", MODEL, 2, "holds no weights"),
    "pickle named safetensors": Artifact(raw_pickle(WEIGHTS), "sft", MODEL, 2, "model.safetensors: "),
    "reward model in .bin": Artifact(pickled("pytorch_model.bin"), "reward_eval", "path", 2, "a pickle", "judge"),
    "critic in .bin": Artifact(pickled("pytorch_model.bin"), "ppo", CRITIC, 2, "a pickle", "scorer"),
    "actor in .bin": Artifact(pickled("pytorch_model.bin"), "ppo", ACTOR, 2, "holds more than tensors"),
    "adapter in .bin": Artifact(pickled_adapter("adapter_model.bin"), "chat", "path", 2, "no pickle is read"),
    "adapter named safetensors": Artifact(
        pickled_adapter("adapter_model.safetensors"), "chat", "path", 2, "adapter_model.safetensors: "
    ),
    "pickle named tokenizer.json": Artifact(raw_pickle("tokenizer.json"), "chat", "path", 2, "no tokenizer that"),
    "pickle named config.json": Artifact(raw_pickle("config.json"), "chat", "path", 2, "cannot be read as JSON"),
    "trainer's files beside the weights": Artifact(
        pickled("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt", instead_of=""),
        "chat", "path", 0, "",
    ),
    "rows in .pkl": Artifact(only("rows.pkl", lambda m: pickle.dumps(Trap(m))), "sft", "data_path", 2, "no data file"),
    "pickle named .parquet": Artifact(
        only("rows.parquet", lambda m: pickle.dumps(Trap(m))), "sft", "data_path", 2, "broken parquet"
    ),
    "data set with a loading script": Artifact(
        after(only("README.md", lambda m: b"x"), script("data.py")), "sft", "data_path", 2, "no data file"
    ),
    "saved data set of an unknown type": Artifact(
        saved_set(features={"prompt": {"_type": "os.mkdir"}}), "sft", "data_path", 2, "not readable as a datasets"
    ),
    "pickle named DeepSpeed JSON": Artifact(
        only("ds.json", lambda m: pickle.dumps(Trap(m))), "sft", "deepspeed_config", 2, "--deepspeed-config: "
    ),
    "YAML that builds objects": Artifact(
        only("c.yaml", lambda m: YAML.replace("MARKER", str(m)).encode()), "sft", "config", 2, "could not determine"
    ),
    "checkpoint from elsewhere": Artifact(
        pickled("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest"),
        "sft", "resume", 5, "manifest.json",
    ),
    "code of its own": Artifact(
        after(change(config(model_type="trap", auto_map=REMOTE)), script("trap.py")), "sft", MODEL, 2, "trap.py"
    ),
    "code of its own, chat": Artifact(
        after(change(config(model_type="trap", auto_map=REMOTE)), script("trap.py")), "chat", "path", 2, "trap.py"
    ),
    "code for a known type": Artifact(
        after(change(config(auto_map=REMOTE)), script("trap.py")), "chat", "path", 0, ""
    ),
    "code in the tokenizer": Artifact(
        after(change(tokenizer(auto_map={"AutoTokenizer": ["trap.T", None]}, tokenizer_class="T")), script("trap.py")),
        "chat", "path", 0, "",
    ),
    "kernel from the hub": Artifact(
        change(config(_attn_implementation_internal=KERNEL)), "sft", MODEL, 2, "_attn_implementation_internal"
    ),
    "kernel from the hub, open": Artifact(
        change(config(attn_implementation=KERNEL)), "chat", "path", 2, "code from the hub is never run"
    ),
    "kernel from the hub, inside": Artifact(
        change(config(text_config={"attn_implementation": {"full": KERNEL}})), "chat", "path", 2, "text_config.attn"
    ),
    "experts from the hub": Artifact(
        change(config(_experts_implementation=KERNEL)), "sft", MODEL, 2, "code from the hub is never run"
    ),
    "private fields": Artifact(change(config(_auto_class="AutoModel", _trap="x")), "chat", "path", 0, ""),
    "template that reaches os": Artifact(jinja(ESCAPE), "chat", "path", 2, "unsafe"),
    "template that lists classes": Artifact(jinja(SUBCLASSES), "sft", MODEL, 2, "unsafe"),
    "template that never ends": Artifact(jinja(ENDLESS), "sft", MODEL, 2, "does not end within"),
    "template that never compiles": Artifact(jinja(CONSTANT), "sft", MODEL, 2, "does not end within"),
    "template that fills the memory": Artifact(jinja(DOUBLING), "chat", "path", 2, "the chat template of"),
    "template that says too much": Artifact(jinja(LOUD), "chat", "path", 2, "characters as"),
    "adapter that imports": Artifact(
        change(adapter(base_model_name_or_path="x", megatron_config={}, megatron_core="trap")),
        "chat", "path", 2, "adapter",
    ),
    "configuration that is a link": Artifact(linked("config.json"), "chat", "path", 2, "cannot be read as JSON"),
    "weights that are a link": Artifact(linked(WEIGHTS), "chat", "path", 2, "no safetensors file"),
    "tokenizer that is a link": Artifact(linked("tokenizer.json"), "chat", "path", 2, "no tokenizer"),
}  # fmt: skip


def test_there_are_twenty_five() -> None:
    assert len(ARTIFACTS) >= 25


def test_the_trap_works(tmp_path: Path) -> None:
    """Otherwise none of them would prove anything."""
    pickle.loads(pickle.dumps(Trap(tmp_path / "marker")))
    assert (tmp_path / "marker").is_dir()


@pytest.mark.parametrize("name", ARTIFACTS)
def test_no_artifact_runs_code(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, marker, spoilt = ARTIFACTS[name], tmp_path / "MARKER", tmp_path / "spoilt"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(templates, "MAX_RENDER_S", SLOW_S)
    shutil.copytree(folder / artifact.source, spoilt)
    shutil.copytree(folder / "base", tmp_path / "good")
    artifact.plant(spoilt, marker)
    files = [path for path in spoilt.iterdir() if path.name in ("ds.json", "c.yaml")]
    value = files[0] if files else spoilt
    ending = call(artifact.command, stage_words(artifact.command, folder, tmp_path / "out", **{artifact.flag: value}))
    assert not marker.exists()
    assert ending.code == artifact.code, ending.stderr
    printed = ending.stdout + ending.stderr
    assert SECRET not in printed and artifact.says in printed
    assert len(ending.errors) == (1 if artifact.code else 0), ending.errors


def test_foreign_pickles_where_deepspeed_chat_kept_its_cache_are_not_opened(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that the data cache opens lies below its own folder, and none of them is a pickle."""
    opened: list[str] = []
    monkeypatch.setattr(torch, "load", lambda file, **words: opened.append(str(file)))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    planted = tmp_path / "tmp" / "data_files"
    planted.mkdir(parents=True)
    raw_pickle("traindata_0.pt")(planted, tmp_path / "MARKER")
    cache = tmp_path / "out" / "cache"
    cache.mkdir(parents=True)
    raw_pickle("sft.pt")(cache, tmp_path / "MARKER")
    ending = call("sft", stage_words("sft", folder, tmp_path / "out", model_name_or_path=folder / "none"))
    assert ending.code == 2
    assert opened == [] and not (tmp_path / "MARKER").exists()


def test_memory_is_limited_for_a_while() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    cores = os.cpu_count() or 1
    with memory_limit(2**20):
        threads = [threading.Thread(target=bytearray, args=(2**16,)) for _ in range(cores)]
        for thread in threads:  # as a pool of a library has them, each with a stack and an arena of malloc
            thread.start()
        for thread in threads:
            thread.join()
    with pytest.raises(MemoryError), memory_limit(2**20):
        bytearray(cores * BYTES_OF_THREADS + 2**30)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert len(bytearray(2**24)) == 2**24


def test_threads_that_limit_memory_at_once_leave_no_limit_behind() -> None:
    """The first one ends before the second, which without turns would restore the limit of the first."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    inside, may_leave, left = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with memory_limit(2**30):
            inside.set()
            may_leave.wait(10)
        left.set()

    def second() -> None:
        with memory_limit(2**30):
            left.wait(10)

    threads = [threading.Thread(target=one) for one in (first, second)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.1)
    may_leave.set()
    for thread in threads:
        thread.join(10)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.faults
def test_a_slow_template_ends_in_time(folder: Path, tmp_path: Path) -> None:
    """With the real limit, and from the user's view: seconds, one line."""
    spoilt = shutil.copytree(folder / "base", tmp_path / "spoilt")
    template(ENDLESS)(spoilt)
    start = time.monotonic()
    assert call("chat", stage_words("chat", folder, tmp_path, model=spoilt)).code == 2
    assert time.monotonic() - start < templates.MAX_RENDER_S + 5

"""Fragments on disk: what safetensors reads of them, and the memory that writing them takes."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.engine.fragments import Fragment, FragmentReader, write_fragments
from pipeline.engine.state import mapped
from pipeline.processes import peak_memory

MIB = 2**20


def test_a_file_of_fragments_is_one_of_safetensors(tmp_path):
    """Views of one tensor, of several types, on which gradients are taken; lengths of which 8 is no divisor."""
    flat = torch.arange(10.0, requires_grad=True)
    values = {"a": flat[:3], "b": flat[3:], "half": flat[:5].bfloat16(), "c": torch.full((1,), 7.0), "d": flat[::2]}
    fragments = [Fragment(name, 4 * len(name), tensor) for name, tensor in values.items()]
    write_fragments(tmp_path / "one.safetensors", fragments)
    assert fragments == []
    found, reader = load_file(tmp_path / "one.safetensors"), FragmentReader([tmp_path / "one.safetensors"])
    assert found.keys() == values.keys()
    for name, tensor in values.items():
        assert found[name].equal(tensor.detach()) and found[name].dtype == tensor.dtype
        out = torch.zeros(len(tensor))
        reader.read_into(name, 4 * len(name), out)
        assert out.equal(tensor.detach().float())


def test_fragments_are_written_without_a_copy_of_them_all(tmp_path):
    """24 fragments of 4 MiB, in memory or mapped from files as of NVMe: the peak rises by one, or by a few pages."""
    held = torch.arange(24 * MIB, dtype=torch.float32)
    held.numpy().tofile(tmp_path / "swapped")
    cut = [slice(n * MIB, (n + 1) * MIB) for n in range(24)]
    in_memory = [Fragment(str(n), 0, held[place]) for n, place in enumerate(cut)]
    on_disk = [Fragment(str(n), 0, mapped(str(tmp_path / "swapped"), p.stop, held.dtype)[p]) for n, p in enumerate(cut)]
    for number, fragments in enumerate((in_memory, on_disk)):
        before = reset_peak()
        write_fragments(tmp_path / f"{number}.safetensors", fragments)
        assert peak_memory() - before < 16 * MIB
    written = [load_file(tmp_path / f"{number}.safetensors") for number in (0, 1)]
    assert all(written[0][name].equal(written[1][name]) and len(written[0]) == 24 for name in written[0])


def reset_peak() -> int:
    """Have the kernel forget this process's peak; return what it holds now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("needs /proc/self/clear_refs")
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])

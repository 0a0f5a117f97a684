"""What `--target` names: GPUs by a name, or a file that describes them."""

import json

import pytest
from support.messages import naming

from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.launching.target import DEVICES, Target, parse_target


def test_hardware_is_read_from_a_name_or_a_file(tmp_path):
    two = parse_target("2x8xA100-40GB")
    assert (two.hosts, two.gpus, two.num_gpus, two.dtype) == (2, 8, 16, "bf16")
    assert 39 * GIB < two.memory < 40 * GIB
    assert parse_target("1xRTX4090").name == "RTX4090-24GB" and parse_target("4xV100-32GB").dtype == "fp32"
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps({"hosts": 3, "gpus": 4, "memory_gib": 95, "name": "Mine"}), encoding="utf-8")
    assert parse_target(str(file)).num_gpus == 12 and parse_target(str(file)).memory == 95 * GIB
    assert [str(Target("X", int(gib * GIB))) for gib in (23.64, 0.5, 0.02)] == [
        f"1 x X, {gib} GiB each" for gib in ("23.6", "0.5", "0.02")
    ]


@pytest.mark.parametrize(
    "name, memory, sheet", [("H100-80GB", 78, "H100-80GB"), ("RTX4090", 20, "RTX4090-24GB"), ("A100", 39, "A100-40GB")]
)
def test_a_file_with_the_name_of_a_device_leaves_its_speeds_to_the_data_sheet(tmp_path, name, memory, sheet):
    file = tmp_path / "target.yaml"
    file.write_text(f"name: {name}\nmemory_gib: {memory}", encoding="utf-8")
    found = parse_target(str(file))
    assert (found.name, found.memory) == (sheet, memory * GIB)
    assert (found.tb_per_s, found.tflops) == DEVICES[sheet][1:]
    assert found.source == "data sheet, not measured"
    file.write_text(f"name: {name}\nmemory_gib: {memory}\ntflops: 7", encoding="utf-8")
    own = parse_target(str(file))
    assert (own.tb_per_s, own.tflops, own.source) == (found.tb_per_s, 7, "as described, not measured")


@pytest.mark.parametrize(
    "text, line",
    [
        ("8xH1000", "--target 8xH1000 ... B200-180GB, H200-141GB"),
        ("8xA100", "--target 8xA100 ... A100-80GB, A100-40GB"),
        ("8x", "--target 8x: ... DEVICE, GPUSxDEVICE, HOSTSxGPUSxDEVICE ... a YAML file"),
        ("0xH100-80GB", "--target 0xH100-80GB: ... DEVICE, GPUSxDEVICE"),
        ("gone.yaml", "--target ... gone.yaml ... No such file"),
        ("memory: 3", "--target ... {file} ... hosts, gpus, name, memory_gib"),
        ("memory_gib: 3\nlink_gb_per_s: 450", "--target ... {file} ... link_gb_per_s: unknown field"),
        ("memory_gib: 3\ngpu: 2", "--target ... {file} ... gpu ... gpus?"),
        ("memory_gib: -3", "--target ... {file} ... memory_gib ... -3 ... above 0"),
        ("memory_gib: 8\ngpus: 1.5", "--target ... {file} ... gpus ... 1.5 ... above 0"),
        ("00xH100-80GB", "--target 00xH100-80GB: ... DEVICE, GPUSxDEVICE"),
        ("9999999999xH100-80GB", "--target 9999999999xH100-80GB: ... DEVICE, GPUSxDEVICE"),
        ("memory_gib: .inf", "--target ... {file} ... memory_gib ... inf ... below 1,000,000"),
        ("memory_gib: 8\ngpus: true", "--target ... {file} ... gpus ... True ... above 0"),
        ("memory_gib: 8\ngpus: 5000\nhosts: 5000", "--target ... {file} ... hosts x gpus ... 1,000,000"),
        ("memory_gib: 8\ngpus: 2\nmemory_gib: 80", "--target ... {file} ... line 3 ... memory_gib ... twice"),
        ("memory_gib: 8\ngpus: [2", "--target: {file}: line 2: "),
        ("- memory_gib: 8", "--target ... {file} ... a list ... `flag: value`"),
        ("memory_gib: 8\nname:", "--target ... {file} ... name ... None ... name of a device"),
    ],
)
def test_what_is_no_hardware_is_refused_in_one_line(tmp_path, text, line):
    file = tmp_path / "target.yaml"
    if ":" in text:
        file.write_text(text, encoding="utf-8")
        text = str(file)
    with pytest.raises(InputError) as refused:
        parse_target(text)
    assert str(refused.value) == naming(line.format(file=file)) and "\n" not in str(refused.value)

"""Devices of `--target` by name or memory, and the names that drivers give them."""

import pytest
from support.messages import naming

from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.launching.target import DEVICES, USABLE, is_model, parse_target

# As `nvidia-smi --query-gpu=name` has them.
DRIVERS = {
    "NVIDIA GeForce RTX 5090": "RTX5090-32GB", "NVIDIA GeForce RTX 3090": "RTX3090-24GB", "NVIDIA A10": "A10-24GB",
    "NVIDIA RTX A6000": "A6000-48GB", "NVIDIA B200": "B200-180GB", "NVIDIA L4": "L4-24GB", "NVIDIA L40S": "L40S-48GB",
    "NVIDIA H200": "H200-141GB", "Tesla T4": "T4-16GB", "NVIDIA H100 80GB HBM3": "H100-80GB",
    "NVIDIA H100 PCIe": "H100-80GB",
}  # fmt: skip


@pytest.mark.parametrize("word", ["RTX5090", "RTX3090", "A10", "A6000", "B200", "H100", "V100-16GB"])
def test_a_name_alone_is_one_card_of_its_data_sheet(word):
    target = parse_target(word)
    assert target == parse_target(f"1x{word}") and target.num_gpus == 1
    memory, tb_per_s, tflops, *_ = DEVICES[target.name]
    assert target.name.endswith(f"-{memory}GB")
    assert (target.memory, target.tb_per_s, target.tflops) == (int(memory * USABLE * GIB), tb_per_s, tflops)


@pytest.mark.parametrize("text, slots", [("24GB", (1,)), ("4x24GB", (4,)), ("2x8x24GB", (8, 8))])
def test_memory_alone_is_a_card_whose_speeds_are_not_known(text, slots):
    target = parse_target(text)
    assert (target.memory, target.slots, target.tflops, target.dtype) == (int(24 * USABLE * GIB), slots, 0, "bf16")
    assert target.source == "as described, not measured" and str(target).endswith("x 24GB, 23.6 GiB each")


@pytest.mark.parametrize(
    "text, line",
    [
        ("MI300X", "MI300X ... an AMD GPU ... CUDA ... 192GB"),
        ("8xMI300X", "MI300X ... an AMD GPU ... CUDA ... 192GB"),
        ("0GB", "DEVICE, GPUSxDEVICE, HOSTSxGPUSxDEVICE (2x8xA100-40GB) or a YAML"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(text, line):
    with pytest.raises(InputError) as refused:
        parse_target(text)
    assert str(refused.value) == naming(f"--target {text}", line)


@pytest.mark.parametrize("name", DRIVERS)
def test_a_drivers_name_is_of_one_device(name):
    assert [device for device in DEVICES if is_model(device, name)] == [DRIVERS[name]]


def test_a_drivers_name_that_leaves_out_the_memory_is_of_all_of_them():
    for name, devices in {
        "NVIDIA A100-SXM4-80GB": ["A100-80GB", "A100-40GB"],
        "NVIDIA A10G": [],
        "NVIDIA GH200 480GB": [],
        "Tesla V100-SXM2-32GB": ["V100-32GB", "V100-16GB"],
    }.items():
        assert [device for device in DEVICES if is_model(device, name)] == devices

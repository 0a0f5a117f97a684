"""The constants of this machine's GPU: measured by the check of a launch script, and read by the next plan."""

import json
import os
import subprocess
import sys

import pytest
import torch
from support.source_tree import ROOT

from pipeline.device import DeviceConstants, bytes_of_cuda
from pipeline.files import GIB
from pipeline.launching.target import DEVICES

pytestmark = pytest.mark.gpu


def test_the_check_keeps_constants_that_the_plan_reads(tmp_path):
    words = ["--model-name-or-path", "base", "--data-path", "none.jsonl", "--output-dir", "out"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "launch/single_gpu.sh"), "--check", "1", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0 and "measured" in done.stdout, done.stderr
    print(done.stdout)
    (found,) = json.loads((tmp_path / "cache/rlhf-pipeline/devices.json").read_text()).values()
    assert found["memory"] == torch.cuda.get_device_properties(0).total_memory
    assert found["context"] > 0.1 * GIB  # more than it ever takes where other tests took of the GPU meanwhile
    assert f"{bytes_of_cuda(DeviceConstants(**found), 1)[0] / GIB:.2f} GiB of CUDA's own" in done.stdout
    sheet = next((values for name, values in DEVICES.items() if name.partition("-")[0] in found["name"]), None)
    if sheet:
        assert 0.4 < found["tb_per_s"] / sheet[1] < 1.05 and 0.4 < found["tflops"] / sheet[2] < 1.05
    assert 1 < found["host_gb_per_s"] < 500
    plan = "from pipeline.launching.target import this_machine, with_constants as w; print(w(this_machine(1)).source)"
    said = subprocess.run(
        [sys.executable, "-c", plan], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert said.stdout == f"measured here on {found['day']}\n", said.stderr

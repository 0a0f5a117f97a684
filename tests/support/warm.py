"""Do once, in the server that runs are forked from, what each of them would do anew; imported there after the rest."""

import importlib
import os

import deepspeed
from support import kernel_mode  # noqa: F401  before triton
from support.frozen import freeze
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from pipeline.engine.private_names import check_private_names

get_checkpoint_conversion_mapping("opt")  # compiles a thousand regular expressions
if os.environ.get("DS_ACCELERATOR") == "cpu":
    _ = deepspeed.ops.__compatible_ops__  # asks the compiler
    # The first engine of ZeRO imports torch's compiler by it: two seconds. With a GPU that might start CUDA here.
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    check_private_names()  # disassembles DeepSpeed's methods, and remembers what it has seen
freeze()

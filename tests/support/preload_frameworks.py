"""Imports the trainers' frameworks of this environment, for the process from which ranks are forked."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch

with (
    warnings.catch_warnings(),
    mock.patch.object(torch, "compile", lambda function: function),  # as in mcore_cpu
):
    warnings.simplefilter("ignore")
    if find_spec("megatron"):
        for _name in ("models.gpt", "optimizer", "distributed.fsdp.mcore_fsdp_adapter", "dist_checkpointing"):
            importlib.import_module(f"megatron.core.{_name}")
    if find_spec("deepspeed"):
        importlib.import_module("deepspeed")
    if find_spec("lightning"):
        importlib.import_module("lightning.pytorch")
    if find_spec("peft"):
        for _name in ("transformers.trainer", "transformers.models.llama.modeling_llama"):
            importlib.import_module(_name)

if find_spec("torchtitan"):
    sys.path.append(str(Path(__file__).parent))
    importlib.import_module("torchtitan_training")

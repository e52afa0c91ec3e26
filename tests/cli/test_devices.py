# SPDX-License-Identifier: BSD-3-Clause
"""gpukern device: this machine's CPU, and a GPU by what it says of itself."""

import json
from types import SimpleNamespace

import pytest
import torch

from torch_gpukern.cli import devices, main

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=143156 << 20,
    L2_cache_size=60 << 20,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    clock_rate=1980000,
    memory_clock_rate=3201000,
    memory_bus_width=6144,
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_and_shows_the_cpu(capsys):
    assert main(["device"]) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("torch finds no GPU; this is the CPU\n\ndevice")
        and "instruction sets" in out
    )
    assert main(["device", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["gpus"] == [] and known["cpu"]["isa"] in known["cpu"]["isas"]
    assert (
        1 <= known["cpu"]["cores_allowed"] <= known["cpu"]["cores"] and known["cpu"]["name"] in out
    )


def test_a_gpu_with_nominal_and_measured_rates():
    known = devices.gpu_facts(H200, 0)
    # what the data sheet says
    assert known["derived_f32_gflops"] == pytest.approx(66.9e3, rel=1e-3)
    assert known["derived_read_gbs"] == pytest.approx(4800, rel=0.03)
    assert (
        known["ridge_flops_per_byte"] == pytest.approx(206, abs=0.5)
        and known["blocks_per_sm"] == 32
    )
    assert (
        700e3 < known["measured"]["bf16"] < known["nominal"]["bf16"]
        and known["measured"]["read"] > 4000
    )
    text = devices.gpu_text(known)
    assert "132, 1.98 GHz at most" in text and "60 MiB" in text and "206 FLOPs a byte" in text
    assert "nominal, dense" in text and "bf16 989.4 TFLOP/s" in text


def test_a_gpu_that_says_little():
    """An older torch tells no clocks, and no data sheet of another name is taken for this one's."""
    bare = SimpleNamespace(
        name="NVIDIA H200 NVL", major=9, minor=0, multi_processor_count=132, total_memory=1 << 37
    )
    known = devices.gpu_facts(bare, 3)
    assert "nominal" not in known and "clock_ghz" not in known and known["measured"] == {}
    text = devices.gpu_text(known)
    assert (
        "cuda:3, NVIDIA H200 NVL" in text
        and "no saved run on a device of this name" in text
        and "None" not in text
    )


@pytest.mark.gpu
def test_this_gpu(capsys):
    assert main(["device", "--json"]) == 0
    (known, *_) = json.loads(capsys.readouterr().out)["gpus"]
    assert (
        known["name"] == torch.cuda.get_device_name(0)
        and known["sms"] > 0
        and known["clock_ghz"] > 0.5
    )

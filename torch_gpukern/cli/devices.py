# SPDX-License-Identifier: BSD-3-Clause
"""python -m torch_gpukern device: this machine's GPUs and CPU, and the rates that its rooflines
use.

Without a GPU, only the CPU is shown. A rate is nominal (the vendor's data sheet, dense), derived
from the device's properties, or measured: the highest of the saved runs on a device of that name
(benchmarks/results/, in a checkout).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from .. import results
from .._library import ops
from .occupancy import SMS
from .roofline import NOMINAL
from .terminal import fields

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# float32 multiply-adds per clock and SM by compute capability: CUDA programming guide
FMAS = {"8.0": 64, "8.6": 128, "8.9": 128, "9.0": 128}
SIZES = {"L2": "l2_bytes", "memory": "memory_bytes"}


def saved_peaks(name: str) -> dict[str, float]:
    """The highest GFLOP/s by dtype, and GB/s of reading ("read"), of the saved runs on a device of
    this name; empty without a saved run."""
    found: dict[str, float] = {}
    path = RESULTS / f"{results.slug(name)}.csv"
    if path.exists():
        for run_ in results.load(path)["benches"].values():
            for what, rate in run_["peaks"].items():
                found[what] = max(found.get(what, 0.0), rate)
    return found


def gpu_facts(properties: Any, index: int) -> dict[str, Any]:
    """A GPU's properties (torch.cuda.get_device_properties) and its rates. Properties that this
    torch does not have are left out."""
    capability = f"{properties.major}.{properties.minor}"
    sm = SMS.get(f"sm_{properties.major}{properties.minor}")
    known = {
        "device": f"cuda:{index}",
        "name": properties.name,
        "capability": capability,
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "shared_bytes_per_sm": getattr(properties, "shared_memory_per_multiprocessor", None),
        "shared_bytes_per_block": getattr(properties, "shared_memory_per_block_optin", None),
        "registers_per_sm": getattr(properties, "regs_per_multiprocessor", None),
        "threads_per_sm": getattr(properties, "max_threads_per_multi_processor", None),
        "blocks_per_sm": sm.blocks if sm else None,
        "warp": getattr(properties, "warp_size", None),
    }
    clock, memory_clock, bits = (
        getattr(properties, name, None)
        for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )
    if clock:
        known["clock_ghz"] = clock / 1e6
        if capability in FMAS:
            known["derived_f32_gflops"] = 2.0 * FMAS[capability] * known["sms"] * clock / 1e6
    if memory_clock and bits:
        known["derived_read_gbs"] = 2 * memory_clock * 1e3 * bits / 8 / 1e9  # two transfers a clock
    nominal = NOMINAL.get(properties.name)
    if nominal:
        known["nominal"] = {k: v if k == "read" else v * 1e3 for k, v in nominal.items()}
        known["ridge_flops_per_byte"] = nominal["bf16"] * 1e3 / nominal["read"]
    known["measured"] = saved_peaks(properties.name)
    return {key: value for key, value in known.items() if value is not None}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _caches() -> dict[str, str]:
    """The sizes of core 0's caches, as Linux prints them: {"L1 data": "48K"}."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = (
                (index / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        found[f"L{level}" + (f" {kind.lower()}" if kind != "Unified" else "")] = size
    return found


def cpu_facts() -> dict[str, Any]:
    """This machine's CPU, and the instruction set that the kernels use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        isa = ops.cpu_isa.default()
    except RuntimeError as error:  # GPUKERN_CPU names an instruction set that this machine lacks
        isa = str(error)
    known = {
        "name": _cpu_name(),
        "cores": os.cpu_count(),
        "cores_allowed": allowed,
        "threads": torch.get_num_threads(),
        "isa": isa,
        "isas": ops.cpu_isas.default().split(","),
        "caches": _caches(),
    }
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        known["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return known


def facts() -> dict[str, Any]:
    """CPU and GPUs, in types that JSON has."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "cpu": cpu_facts(),
        "gpus": [gpu_facts(torch.cuda.get_device_properties(i), i) for i in range(count)],
    }


def _rates(rates: dict[str, float]) -> str:
    flops = [
        f"{dtype} {rate / 1e3:,.1f} TFLOP/s" for dtype, rate in rates.items() if dtype != "read"
    ]
    return ", ".join([*flops, f"reading {rates['read']:,.0f} GB/s"] if "read" in rates else flops)


def gpu_text(known: dict[str, Any]) -> str:
    """A GPU's facts as lines."""
    rows = [
        ("device", f"{known['device']}, {known['name']}, compute capability {known['capability']}")
    ]
    clock = f", {known['clock_ghz']:.2f} GHz at most" if "clock_ghz" in known else ""
    rows.append(("SMs", f"{known['sms']}{clock}"))
    of_sm = [
        f"{known[key]:,} {what}"
        for key, what in (
            ("threads_per_sm", "threads"),
            ("blocks_per_sm", "blocks"),
            ("registers_per_sm", "registers"),
            ("shared_bytes_per_sm", "bytes of shared memory"),
        )
        if key in known
    ]
    if of_sm:
        rows.append(("per SM", ", ".join(of_sm)))
    if "shared_bytes_per_block" in known:
        rows.append(
            ("per block", f"{known['shared_bytes_per_block']:,} bytes of shared memory at most")
        )
    rows += [
        (name, f"{known[key] / 2**20:,.0f} MiB") for name, key in SIZES.items() if key in known
    ]
    if "derived_f32_gflops" in known:
        rows.append(
            (
                "from its clock",
                f"f32 {known['derived_f32_gflops'] / 1e3:,.1f} TFLOP/s without tensor cores",
            )
        )
    if "derived_read_gbs" in known:
        rows.append(("from its memory clock", f"reading {known['derived_read_gbs']:,.0f} GB/s"))
    if "nominal" in known:
        rows.append(("nominal, dense", _rates(known["nominal"])))
        rows.append(("ridge", f"{known['ridge_flops_per_byte']:.0f} FLOPs a byte in bf16"))
    rows.append(("measured", _rates(known["measured"]) or "no saved run on a device of this name"))
    return fields(rows)


def cpu_text(known: dict[str, Any]) -> str:
    rows = [
        ("device", f"cpu, {known['name']}"),
        (
            "cores",
            f"{known['cores']}, this process may use {known['cores_allowed']}; torch uses "
            f"{known['threads']}",
        ),
        ("instruction sets", f"{known['isa']} in use, of {', '.join(known['isas'])}"),
    ]
    if known["caches"]:
        rows.append(
            ("caches", ", ".join(f"{name} {size}" for name, size in known["caches"].items()))
        )
    if "memory_bytes" in known:
        rows.append(("memory", f"{known['memory_bytes'] / 2**20:,.0f} MiB"))
    rows.append(
        (
            "rates",
            "no nominal rates for a CPU: `gpukern bench` measures calls, `benchmarks/run_all.py` "
            "the ceilings",
        )
    )
    return fields(rows)


def add_arguments(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser(
        "device", help="this machine's GPUs and CPU, and the rates of their rooflines"
    )
    p.set_defaults(run=run)
    p.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    known = facts()
    if args.json:
        print(json.dumps(known, indent=2))
        return 0
    parts = [gpu_text(gpu) for gpu in known["gpus"]] or ["torch finds no GPU; this is the CPU"]
    print("\n\n".join([*parts, cpu_text(known["cpu"])]))
    return 0

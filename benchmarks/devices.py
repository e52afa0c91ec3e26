# SPDX-License-Identifier: BSD-3-Clause
"""The device of a benchmark: the cores of this machine or its GPU.

Both classes have the same methods. `name` and `driver` identify the device. `peaks`, `readers` and
`page_readers` say what it can do. `estimate` and `time_block` time calls. `state` gives clock and
power of the last block. `sync` waits for calls, and `forget` frees what blocks have kept.
`carries_over` says whether the clock of a block depends on the block before it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROTATE_BYTES = 256 << 20
ISAS = ("base", "avx2", "avx512", "avx512bf16")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Cpu:
    """This machine's cores, through torch's thread pool."""

    most_calls = 10_000
    host_bound = None  # unknown, because the device is the host
    carries_over = False

    kind = "cpu"

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._library = self._build_peak()
        self._pool = ThreadPoolExecutor(torch.get_num_threads())

    @staticmethod
    def _build_peak():
        """Compiles peak.c into a library. Returns None without a compiler; then only torch's own
        loops set the peak."""
        compiler = os.environ.get("CC") or shutil.which("cc")
        if compiler is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "peak.so"
            command = [
                compiler,
                "-O3",
                "-ffp-contract=fast",
                "-shared",
                "-fPIC",
                str(HERE / "peak.c"),
                "-o",
                str(path),
            ]
            has_openmp = subprocess.run([*command, "-fopenmp"], capture_output=True).returncode == 0
            if not has_openmp:
                subprocess.run(command, check=True)
            library = ctypes.CDLL(str(path))
        library.peak_madd.restype = ctypes.c_double
        library.peak_madd.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
        library.peak_read.restype = ctypes.c_float
        library.peak_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        library.peak_read_pages.restype = ctypes.c_float
        library.peak_read_pages.argtypes = [
            *[ctypes.c_void_p] * 3,
            *[ctypes.c_int64] * 2,
            *[ctypes.c_int] * 2,
        ]
        library.has_openmp = has_openmp
        return library

    def name(self) -> str:
        model = "CPU"
        cpuinfo = Path("/proc/cpuinfo")
        if cpuinfo.exists():
            for line in cpuinfo.read_text().splitlines():
                if line.startswith("model name"):
                    model = line.split(":", 1)[1].strip()
                    break
        import torch_gpukern  # noqa: F401  (registers the op: the set that the kernels use, not the best one there is)

        return f"{model}, {torch.get_num_threads()} threads, {torch.ops.gpukern.cpu_isa()}"

    def isas(self) -> list[str]:
        """Instruction sets of this machine, worst first."""
        if self._library is None:
            return ["base"]
        return [isa for i, isa in enumerate(ISAS) if self._library.peak_has(i)]

    def madd_peak(self, isa: str, dtype: str) -> float:
        """Multiply-add peak in GFLOP/s of all threads with one instruction set. float16, and
        bfloat16 below avx512bf16, are float32 arithmetic on converted operands."""
        if self._library is None:
            return 0.0
        index, dot = ISAS.index(isa), int(dtype == "bf16")
        threads, rounds, best = torch.get_num_threads(), 20_000, 0.0
        begin = end = time.perf_counter()
        while end < begin + 0.2:  # longer than another program usually occupies a core
            start = end
            done = self._pool.map(
                lambda _: self._library.peak_madd(index, dot, rounds), range(threads)
            )
            flops, end = sum(done), time.perf_counter()
            best = max(best, flops / (end - start) / 1e9)
        return best

    def _torch_peak(self, dtype: torch.dtype) -> float:
        n = 1024
        a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
        best = min(self.time_block(lambda: a @ b, 1) for _ in range(8))
        return 2 * n**3 / best / 1e3

    def readers(self) -> dict[str, Callable[[Tensor], object]]:
        """Ways to read a contiguous tensor once with all threads: torch's sum and our own loop."""
        readers = {"torch's read": lambda x: x.view(-1).view(torch.float32).sum()}
        if self._library is not None:
            threads = torch.get_num_threads()

            def own_read(x: Tensor) -> None:
                share = x.nbytes // 4 // threads
                starts = range(x.data_ptr(), x.data_ptr() + 4 * share * threads, 4 * share)
                list(self._pool.map(lambda start: self._library.peak_read(start, share), starts))

            readers["our read"] = own_read
        return readers

    def page_readers(self) -> dict[str, Callable[[Tensor, Tensor, Tensor], object]]:
        """Ways to read the pages of two caches [num_blocks, ...] in the order of a table with all
        threads: plain loads, and loads with the next page prefetched. Empty without a compiler that
        has OpenMP."""
        if self._library is None or not self._library.has_openmp:
            return {}
        threads = torch.get_num_threads()

        def reader(fetch: int) -> Callable[[Tensor, Tensor, Tensor], object]:
            def read(k: Tensor, v: Tensor, table: Tensor) -> None:
                caches = (k.data_ptr(), v.data_ptr(), table.data_ptr())
                self._library.peak_read_pages(*caches, table.numel(), k[0].nbytes, fetch, threads)

            return read

        return {"reading the pages": reader(0), "reading the pages, fetched ahead": reader(1)}

    def _read_bandwidth(self) -> float:
        data = torch.ones(ROTATE_BYTES // 4)
        best = min(
            self.time_block(lambda read=read: read(data), 1)
            for read in self.readers().values()
            for _ in range(8)
        )
        return data.nbytes / best / 1e3

    def peaks(self) -> dict[str, float]:
        """GFLOP/s per dtype and GB/s read, each the best of our own loop and of torch's."""
        isa = self.isas()[-1]
        peaks = {}
        for name, dtype in DTYPES.items():
            ours = max(self.madd_peak(row, name) for row in self.isas())
            # torch has no fast float16 product on most CPUs: float32 arithmetic is its ceiling
            theirs = self._torch_peak(dtype) if name != "f16" else 0.0
            peaks[name] = max(ours, theirs)
        peaks["read"] = self._read_bandwidth()
        peaks["isa"] = isa
        return peaks

    def sync(self) -> None:
        """Does nothing: calls are synchronous."""

    def state(self) -> tuple[float, float]:
        """Clock and power of a CPU cannot be read without rights."""
        return 0.0, 0.0

    def forget(self) -> None:
        """Does nothing: blocks keep nothing."""

    def driver(self) -> str:
        return ""

    def can_replay(self, call: Callable[[], object]) -> bool:
        """Always true: every call is timed as it is."""
        return True

    def estimate(self, call: Callable[[], object]) -> float:
        """us of one call, roughly."""
        return self.time_block(call, 1)

    def time_block(self, call: Callable[[], object], calls: int, live: bool = False) -> float:
        """us per call of `calls` calls in a row."""
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls * 1e6


class Sensors:
    """SM clock and power through the driver's library NVML, which answers within a millisecond. A
    process of nvidia-smi takes longer than most cases. Without the library both are 0."""

    SM_CLOCK, POWER_INSTANT = 1, 186  # NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT

    class Field(ctypes.Structure):
        """nvmlFieldValue_t"""

        _fields_ = [
            ("id", ctypes.c_uint),
            ("scope", ctypes.c_uint),
            ("timestamp", ctypes.c_longlong),
            ("latency_us", ctypes.c_longlong),
            ("type", ctypes.c_int),
            ("status", ctypes.c_int),
            ("value", ctypes.c_ulonglong),
        ]

    def __init__(self) -> None:
        self._device = None
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
            # by UUID, because NVML also counts devices that this process cannot see
            uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
            device = ctypes.c_void_p()
            if self._nvml.nvmlInit_v2() == 0:
                found = self._nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device)) == 0
                if found or self._nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0:
                    self._device = device
        except (OSError, AttributeError):
            pass

    def read(self) -> tuple[float, float]:
        """MHz and watts at this moment."""
        if self._device is None:
            return 0.0, 0.0
        clock, milliwatts = ctypes.c_uint(), ctypes.c_uint()
        self._nvml.nvmlDeviceGetClockInfo(self._device, self.SM_CLOCK, ctypes.byref(clock))
        # nvmlDeviceGetPowerUsage gives the mean of the last second, which a short case does not
        # fill, so the instantaneous power is asked for first
        field = self.Field(id=self.POWER_INSTANT)
        status = self._nvml.nvmlDeviceGetFieldValues(self._device, 1, ctypes.byref(field))
        if status == 0 and field.status == 0:
            return float(clock.value), (field.value & 0xFFFFFFFF) / 1e3
        self._nvml.nvmlDeviceGetPowerUsage(self._device, ctypes.byref(milliwatts))
        return float(clock.value), milliwatts.value / 1e3


def nvidia_driver() -> str:
    """The version of NVIDIA's driver; empty if nvidia-smi does not answer."""
    command = [
        "nvidia-smi",
        "--query-gpu=driver_version",
        "--format=csv,noheader,nounits",
        "-i",
        "0",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class Cuda:
    """One CUDA device. A block of calls is recorded once as a CUDA graph and replayed, because
    events around single calls would measure the launch."""

    kind = "cuda"
    most_calls = 512  # nodes of a graph
    carries_over = True

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self._side = torch.cuda.Stream()
        self._sensors = Sensors()
        self._state = 0.0, 0.0
        self.host_bound: bool | None = None  # whether the last block waited for the host
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Callable]] = {}

    def name(self) -> str:
        return torch.cuda.get_device_name()

    def peaks(self) -> dict[str, float]:
        """Peaks that large products and a large read reach in this run."""
        peaks = {}
        for name, dtype in (DTYPES | {"tf32": torch.float32}).items():
            a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            best = min(self.time_block(lambda a=a, b=b: a @ b, 4) for _ in range(4))
            torch.backends.cuda.matmul.allow_tf32 = False
            peaks[name] = 2 * 8192**3 / best / 1e3
            self.forget()
        data = torch.ones(1 << 28, device="cuda")
        best = min(self.time_block(lambda: torch.sum(data), 4) for _ in range(4))
        peaks["read"] = data.nbytes / best / 1e3
        self.forget()
        return peaks

    def readers(self) -> dict[str, Callable[[Tensor], object]]:
        """Ways to read a contiguous tensor once."""
        return {"torch's read": lambda x: x.view(-1).view(torch.float32).sum()}

    def page_readers(self) -> dict[str, Callable[[Tensor, Tensor, Tensor], object]]:
        """None: on a GPU pages in any order are read as fast as a contiguous tensor."""
        return {}

    def sync(self) -> None:
        torch.cuda.synchronize()

    def state(self) -> tuple[float, float]:
        """SM clock in MHz and power in watts, read while the last block ran."""
        return self._state

    def driver(self) -> str:
        return nvidia_driver()

    def estimate(self, call: Callable[[], object]) -> float:
        """us of one call, roughly. Its launches are queued behind a wait, so that they do not
        count."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def time_block(self, call: Callable[[], object], calls: int, live: bool = False) -> float:
        """us per call of `calls` calls in a row, by the device's clock. `live` calls are made one
        by one instead of replayed."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if live:
            torch.cuda._sleep(1_000_000)  # so that the first launch does not count
            start.record()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            issuing = time.perf_counter() - began
        else:
            issuing = 0.0
            graph = self._graph(call, calls)
            start.record()
            graph.replay()
        end.record()
        start.synchronize()
        self._state = self._sensors.read()
        end.synchronize()
        # true if the device finishes calls as fast as the host issues them
        self.host_bound = issuing * 1e3 > 0.9 * start.elapsed_time(end)
        return start.elapsed_time(end) / calls * 1e3

    def can_replay(self, call: Callable[[], object]) -> bool:
        """Whether a call can be captured. torch's own context ends a capture that fails."""
        try:
            with torch.cuda.stream(self._side):
                call()
            torch.cuda.synchronize()
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._side):
                call()
            return True
        except Exception as error:  # another project may raise anything
            words = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"called, not replayed from a graph: {words}", flush=True)
            torch.cuda.synchronize()
            return False

    def _graph(self, call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
        """Records `calls` calls as one graph. torch.cuda.graph() also collects garbage and empties
        torch's cache each time, which costs more than a short case."""
        key = (id(call), calls)
        if key in self._graphs:
            return self._graphs[key][0]
        self._side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._side):
            call()  # a capture needs a warm allocator and loaded kernels
            torch.cuda.synchronize()
            gc.disable()  # nothing of an earlier graph may be freed during a capture
            try:
                graph.capture_begin()
                for _ in range(calls):
                    call()
                graph.capture_end()
            finally:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._side)
        self._graphs[key] = (graph, call)  # holding `call` keeps its id from being reused
        return graph

    def forget(self) -> None:
        """Frees the graphs and the memory that they held."""
        torch.cuda.synchronize()
        self._graphs.clear()
        torch.cuda.empty_cache()


def open_device(kind: str) -> Cpu | Cuda:
    """The device of kind "cpu" or "cuda"."""
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("--device cuda: torch finds no CUDA device")
        return Cuda()
    return Cpu()

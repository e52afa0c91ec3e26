# SPDX-License-Identifier: BSD-3-Clause
"""cuDNN through torch on the convolution of conv_gemm.cu: 3 x 3, 128 channels to 128. Run `python
conv_cudnn.py` on a GPU.

Its result is bfloat16 and that of conv_gemm.cu float32, so cuDNN writes half as many bytes.
"""

import torch
from torch.nn.functional import conv2d

CHANNELS, HEIGHT, WIDTH = 128, 512, 512


def numbers(*shape: int) -> torch.Tensor:
    """Small integers, as in conv_gemm.cu. Sums of them are exact in float32."""
    return torch.randint(-6, 7, shape, device="cuda").to(
        torch.bfloat16, memory_format=torch.channels_last
    )


def median_us(call, times: int = 21) -> float:
    found = []
    for _ in range(times + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return sorted(found[3:])[times // 2]


def main() -> None:
    x, weight = numbers(1, CHANNELS, HEIGHT, WIDTH), numbers(CHANNELS, CHANNELS, 3, 3)
    torch.backends.cudnn.benchmark = True  # cuDNN picks its fastest kernel
    small = x[:, :, :20, :33].contiguous(memory_format=torch.channels_last)
    want = conv2d(small.double(), weight.double(), padding=1)
    assert torch.equal(conv2d(small, weight, padding=1), want.to(torch.bfloat16)), "cuDNN is wrong"
    us = median_us(lambda: conv2d(x, weight, padding=1))
    gflops = 2 * CHANNELS * CHANNELS * 9 * HEIGHT * WIDTH / us * 1e-3
    print(
        f"cuDNN {torch.backends.cudnn.version()}: {us:.0f} us, {gflops:.0f} GFLOP/s on "
        f"{torch.cuda.get_device_name()}"
    )


if __name__ == "__main__":
    main()

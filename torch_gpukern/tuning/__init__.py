# SPDX-License-Identifier: BSD-3-Clause
"""Tuning: finds by measurement the kernel instance that serves a call fastest, where the library's
estimate is wrong (`docs/architecture.md`).

cache reads and writes the file of tuned instances, timing times calls, and gemm finds the fastest
instance of a gemm.
"""

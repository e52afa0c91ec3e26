# SPDX-License-Identifier: BSD-3-Clause
"""Which row of the library's tables serves a call, where measuring knows better than its estimate
(`docs/architecture.md`).

cache reads and writes the file of tuned rows, timing times calls, gemm finds the fastest row of a
gemm.
"""

# SPDX-License-Identifier: BSD-3-Clause
"""Linear layers of few bits: their formats (schemes), modules, calibration, training, importers and
files."""

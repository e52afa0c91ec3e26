# SPDX-License-Identifier: BSD-3-Clause
"""Quantised linear layers: formats (schemes), modules, calibration, training, importers and files."""

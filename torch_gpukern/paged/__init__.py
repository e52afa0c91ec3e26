# SPDX-License-Identifier: BSD-3-Clause
"""The parts of `torch_gpukern.PagedKVCache` (kv_cache.py), which is all that callers see.

pages and scales hold the tensors: keys, values and their scales. bookkeeping decides on the host
which sequence owns which page. It uses growth and prefixes, these use sequences, and that uses
pool.
"""

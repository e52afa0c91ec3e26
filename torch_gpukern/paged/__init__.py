# SPDX-License-Identifier: BSD-3-Clause
"""What `torch_gpukern.PagedKVCache` is made of: pages of keys and values (pages, scales), and whose
they are (pool <- sequences <- growth, prefixes <- bookkeeping). Callers see the class alone.
"""

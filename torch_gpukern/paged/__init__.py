# SPDX-License-Identifier: BSD-3-Clause
"""The bookkeeping behind `torch_gpukern.PagedKVCache`: pool <- sequences <- growth, prefixes. Callers see the class alone."""

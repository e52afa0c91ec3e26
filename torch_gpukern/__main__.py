# SPDX-License-Identifier: BSD-3-Clause
"""python -m torch_gpukern info | doctor | explain | bench | tune | layout | occupancy | roofline"""

import sys

from .cli.commands import main

sys.exit(main())

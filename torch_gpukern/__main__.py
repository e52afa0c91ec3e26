"""python -m torch_gpukern info | explain | bench | tune | layout | occupancy"""

import sys

from .cli import main

sys.exit(main())

"""python -m torch_gpukern info | explain | bench | tune | layout"""

import sys

from .cli import main

sys.exit(main())

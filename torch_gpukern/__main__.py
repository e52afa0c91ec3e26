"""python -m torch_gpukern info | explain | bench | tune"""

import sys

from .cli import main

sys.exit(main())

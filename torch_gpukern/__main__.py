"""python -m torch_gpukern info | explain | bench"""

import sys

from .cli import main

sys.exit(main())

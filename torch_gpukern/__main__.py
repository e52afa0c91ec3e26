"""python -m torch_gpukern info | doctor | explain | bench | tune"""

import sys

from .cli import main

sys.exit(main())

# SPDX-License-Identifier: BSD-3-Clause
"""Makes the fixtures, marks and helpers of tests/conftest.py available here, also for `from
conftest import ...`.
"""

import sys
from pathlib import Path

_tests = Path(__file__).resolve().parents[2] / "tests"
sys.path.insert(0, str(_tests))  # for the modules that it imports
_shared = {"__name__": __name__, "__file__": str(_tests / "conftest.py")}
exec(compile(Path(_shared["__file__"]).read_text(), _shared["__file__"], "exec"), _shared)
globals().update({name: value for name, value in _shared.items() if not name.startswith("__")})
__all__ = _shared["__all__"]

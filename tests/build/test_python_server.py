# SPDX-License-Identifier: BSD-3-Clause
"""tests/python_server.py: code in its processes meets what it would meet under `python -c`."""

import json
import signal
import subprocess

import pytest
from conftest import run_python

SHOW = """
import json, os, sys
print(json.dumps([__name__, sys.argv, sys.path, os.getcwd(), sys.stdin.read(), sorted(os.environ)]))
"""


def test_names_paths_and_variables_are_those_of_an_interpreter():
    found, want = (
        json.loads(run_python(SHOW, {"ONE": "1"}, fresh=fresh).stdout) for fresh in (False, True)
    )
    for paths in (found[2], want[2]):  # an entry that is there twice is found once
        paths[:] = dict.fromkeys(paths)
    assert found == want


def test_a_process_leaves_nothing_to_the_next():
    run_python("import os, torch, torch_gpukern; os.environ['TWO'] = '2'; torch.set_num_threads(3)")
    run_python("""
        import os, sys
        assert "TWO" not in os.environ
        assert "torch" in sys.modules and "torch_gpukern" not in sys.modules
        import torch
        assert not torch.cuda.is_initialized() and torch.get_num_threads() != 3
        """)


@pytest.mark.parametrize(
    "code, status, out, error",
    (
        ("raise SystemExit(7)", 7, "", ""),
        ("import sys; print('a'); sys.exit('b')", 1, "a\n", "b\n"),
        ("1 / 0", 1, "", "ZeroDivisionError: division by zero\n"),
        ("import os; os.abort()", -signal.SIGABRT, "", ""),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
    ),
    ids=("status", "text", "exception", "signal", "atexit"),
)
def test_how_a_process_ends(code, status, out, error):
    done = run_python(code, check=False)
    assert (done.returncode, done.stdout) == (status, out)
    assert done.stderr.endswith(error) and bool(done.stderr) == bool(error)


def test_a_process_that_takes_too_long_is_killed():
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("import time; time.sleep(60)", timeout=1)
    assert run_python("print(1)").stdout == "1\n"

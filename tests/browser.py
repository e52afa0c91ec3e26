# SPDX-License-Identifier: BSD-3-Clause
"""A browser without a window, where one is installed: what a page becomes once its script has run.

Debian and Ubuntu: apt-get install chromium. Without a browser the tests are skipped with a reason; with
GPUKERN_TEST_BROWSER=1, which .ci/run sets where it found or installed one, they fail.
"""

import functools
import os
import re
import shutil
import subprocess
from html import unescape

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@functools.cache
def found():
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def lacks(reason):
    """Skips the test for this reason, or fails it in .ci/run."""
    (pytest.fail if os.environ.get("GPUKERN_TEST_BROWSER") == "1" else pytest.skip)(reason)


def dom(url, folder, width=1280, seconds=20):
    """The page's elements as text, less its scripts, after they ran this many seconds of its clock.

    folder: an empty one, for the browser's profile. Pages of the disk may read each other.
    """
    if not found():
        lacks(f"no browser: none of {', '.join(NAMES)} is on the path")
    command = [
        found(),
        "--headless",
        "--no-sandbox",  # which root cannot have
        "--disable-gpu",
        "--disable-web-security",
        "--allow-file-access-from-files",
        f"--user-data-dir={folder}",
        f"--window-size={width},900",
        f"--virtual-time-budget={1000 * seconds}",
        "--dump-dom",
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return re.sub(r"<script\b.*?</script>", "", done.stdout, flags=re.DOTALL)


def text_of(page, ident):
    """The text of the element of this id, which holds no other element."""
    match = re.search(rf'<(\w+)[^>]*\bid="{ident}"[^>]*>([^<]*)</\1>', page)
    assert match, f"the page has no text at #{ident}"
    return unescape(match[2])

"""The quick judge, with the cache of the node that it runs on as the device.

It answers once both nodes have begun to judge, even if one of them takes long to start its first worker.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from pathlib import Path

from quick_judge import main

_BOTH_NODES_SECONDS = 60

if __name__ == "__main__":
    cache = Path(os.environ["KERNEL_BUILDER_CACHE"])
    (cache / "judging").touch()
    deadline = time.monotonic() + _BOTH_NODES_SECONDS
    while len(list(cache.parent.glob("*/judging"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = main(Path(sys.argv[1]), Path(sys.argv[3]))
    print(output.getvalue().replace('"device": "none"', f'"device": "{cache.name}"'))
    sys.exit(status)

"""Pinned workloads; each module is a command: ``python -m bench.NAME``."""

import os

# The servers that a benchmark starts are on this machine: no proxy of the environment is asked for them.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "127.0.0.1", "localhost")))

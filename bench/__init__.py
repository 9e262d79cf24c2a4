"""Benchmarks with pinned workloads; each module is a command: ``python -m bench.NAME``."""

import os

# The servers that a benchmark starts are on this machine, so requests to them bypass the environment's proxy.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "127.0.0.1", "localhost")))

"""Tests are packages, so mirrored folders may repeat file names: `from tests.cases import ...`."""

HANGS = 900
"""Seconds after which something hangs, however slow the machine: no test is about its wall time."""

NEVER_ENDS = f"""import time
print('here', flush=True)
for _ in range({10 * HANGS}):  # of a signal just before a sleep Python learns behind it
    time.sleep(0.1)
"""
"""Code of a module whose import says that it has begun, and goes on until a signal ends it."""

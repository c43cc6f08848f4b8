"""Tests run side by side, one thread each: threads that share a core wait for each other."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; subprocesses inherit it

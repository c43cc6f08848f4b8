"""fedkd: personalised federated learning with knowledge distillation, simulated."""

import os

__version__ = "0.1.0"

# How long OpenMP's threads, which help the main one, wait busily for more of it: some microseconds instead of some
# milliseconds, in which the workers (`federation/workers.py`) want their cores. It is read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

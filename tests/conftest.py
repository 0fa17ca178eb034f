"""Settings of every test: no network, one thread, no progress bars; set before any library reads them."""

from __future__ import annotations

import os

# Sums in one order give the same last bits on every machine, and test processes side by side do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

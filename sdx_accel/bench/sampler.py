"""Samples a card's memory use every 20 ms from its own process, as the driver sees it.

    python -m sdx_accel.bench.sampler INDEX FILE

Starts no CUDA context of its own. Prints "ready" once it samples, stops when its standard input
closes, and writes {"idle", "peak", "samples", "period_ms"} in bytes to FILE.
"""

import json
import sys
import threading
import time
from pathlib import Path

PERIOD_S = 0.02


def _main() -> None:
    import pynvml

    index, target = int(sys.argv[1]), Path(sys.argv[2])
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def used() -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)

    idle = peak = used()
    samples = 1
    closed = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        closed.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    print("ready", flush=True)
    while not closed.is_set():
        peak = max(peak, used())
        samples += 1
        time.sleep(PERIOD_S)
    record = {"idle": idle, "peak": peak, "samples": samples, "period_ms": PERIOD_S * 1e3}
    target.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    _main()

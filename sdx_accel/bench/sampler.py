"""Samples a card's memory use every 20 ms from its own process, as the driver sees it.

    python -m sdx_accel.bench.sampler INDEX FILE [series]

Starts no CUDA context of its own. Prints "ready" once it samples, stops when its standard input
closes, and writes {"idle", "peak", "samples", "period_ms"} in bytes to FILE; with `series` also
every sample as [seconds since 1970, bytes].
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["PERIOD_S", "sampled"]

PERIOD_S = 0.02


@contextmanager
def sampled(found: dict[str, Any], *, series: bool = False) -> Iterator[None]:
    """Fill `found` with what another process sampled of card 0 over the block.

    Args:
        found: updated with "idle", "peak" (bytes), "samples", "period_ms".
        series: also "series", every sample as (seconds since 1970, bytes).
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.json"
        command = [sys.executable, "-m", "sdx_accel.bench.sampler", "0", str(file)]
        child = subprocess.Popen(
            command + ["series"] * series, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield
        finally:
            child.stdin.close()
            child.wait(timeout=30)
            child.stdout.close()
        found.update(json.loads(file.read_text(encoding="utf-8")))


def _main() -> None:
    import pynvml

    index, target = int(sys.argv[1]), Path(sys.argv[2])
    series: list[tuple[float, int]] | None = [] if sys.argv[3:] == ["series"] else None
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
        now = used()
        peak = max(peak, now)
        samples += 1
        if series is not None:
            series.append((time.time(), now))
        time.sleep(PERIOD_S)
    record: dict[str, Any] = {"idle": idle, "peak": peak, "samples": samples}
    record["period_ms"] = PERIOD_S * 1e3
    if series is not None:
        record["series"] = series
    target.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    _main()

"""The dry run of the benchmark of two segments of keys."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "kernels" / "bench" / "bench_segments.py"


def test_both_forms_of_one_softmax_agree(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    subprocess.run([sys.executable, str(BENCH), "--tiny", "--json", str(out)], check=True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["shape"] for row in rows] == ["tiny", "tiny-ip"]
    for row in rows:
        assert row["difference"] < 1e-5
        assert min(row[f"{way}_ms"] for way in ("joined", "merged", "first", "both")) > 0

"""What a budget costs: SDXL's steps with weights in a ring, beside the bound and other tools.

    python -m sdx_accel.bench.streaming [--model random:sdxl-fp16vae] [--kind plain|lora|controlnet]
        [--sizes 512,1024] [--budgets 2,2.5,3,4,6,8] [--throttle 12,25] [--graph]
        [--peers] [--peer-budgets 3,6]
        [--steps 8] [--four-steps] [--tiny]

One process for all rows, so that all see the same machine. First what computing takes with nothing
in its way: C, the fastest of our resident run, stock, and stock in a CUDA graph. Then what the link
gives beside a busy GPU: B. Then each budget: the plan is written down, a picture warms up, another
is timed, and its latents are compared with the resident run's bit by bit. Two bounds: with what the
plan streams, and with the least that any plan would have to (all but budget − context − activations
− two units). Writes streaming.json into $OUT, or the current folder, after every row.
"""

import argparse
import gc
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdx_accel.bench import other_tools
from sdx_accel.bench.cell import StepClock
from sdx_accel.bench.contenders import (
    PEERS,
    add_lora,
    graphed,
    measure_link,
    offload,
    recorded_calls,
    renew,
    step_of,
    timed_picture,
    with_controlnet,
)
from sdx_accel.bench.numbers import at_least_one
from sdx_accel.bench.sampler import sampled

__all__ = ["main", "run"]

GIB = 1 << 30
BUDGETS = "2,2.5,3,4,5,6,6.8,7,8,12"


class Bench:
    """One model and kind on one device, and the document that is written.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.torch = torch
        self.options = options
        self.device = "cpu" if options.tiny else "cuda"
        self.steps, self.guidance = (4, 1.0) if options.four_steps else (8, 5.0)
        if options.tiny:
            self.steps = 2
        self.steps = options.steps or self.steps
        #: the budget that the pipeline is held to, None when it is not
        self.held: float | None = None
        self.clock = StepClock(torch, self.device)
        self.rows: list[dict[str, Any]] = []
        self.document: dict[str, Any] = {
            "command": " ".join(["python -m sdx_accel.bench.streaming", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "card": torch.cuda.get_device_name() if self.device == "cuda" else "none",
            "rows": self.rows,
        }
        name = "streaming-tiny.json" if options.tiny else "streaming.json"
        self.target = Path(os.environ.get("OUT", ".")) / name

    def write(self) -> None:
        """The document as it stands: a run that is cut short keeps its rows."""
        self.target.write_text(json.dumps(self.document, indent=1), encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        """A finished row: print and write it."""
        self.rows.append(row)
        self.write()
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        shown.pop("plan", None)
        print(json.dumps(shown, ensure_ascii=False), flush=True)

    def load(self) -> Any:
        """The pipeline of the kind asked for, on the CPU."""
        from sdx_accel.runtime import checkpoints

        spec = "random:sdxl-tiny" if self.options.tiny else self.options.model
        pipe = checkpoints.load(spec, dtype="fp32" if self.options.tiny else "fp16")
        if self.options.kind == "controlnet":
            pipe = with_controlnet(pipe, spec)
        if self.options.kind == "lora":
            add_lora(pipe)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def picture(self, pipe: Any, size: int, prompt: int = 0) -> tuple[Any, float, float]:
        """(latents on the host, seconds a step, seconds) of one picture, decode included."""
        arguments: dict[str, Any] = {}
        if self.options.kind == "controlnet":
            generator = self.torch.Generator().manual_seed(1)
            arguments["image"] = self.torch.rand(1, 3, size, size, generator=generator)
        arguments |= {"size": size, "steps": self.steps, "guidance": self.guidance}
        return timed_picture(pipe, self.clock, prompt, **arguments)

    def empty(self) -> None:
        """Give back what nobody uses, so that a row sees only itself."""
        gc.collect()
        if self.device == "cuda":
            self.torch.cuda.empty_cache()

    def computing(self, pipe: Any, size: int) -> tuple[dict[str, Any], Any]:
        """C and the resident run's latents, by prompt."""
        pipe.to(self.device)
        with recorded_calls(pipe) as calls:
            self.picture(pipe, size)
        _, stock, _ = self.picture(pipe, size)
        graph = graphed(step_of(pipe, calls))[0] if self.device == "cuda" else None
        calls.clear()
        held = self.torch.cuda.memory_allocated() if self.device == "cuda" else 0
        begin = time.perf_counter()
        pipe.enable_xattn()
        enabling = time.perf_counter() - begin
        if self.device == "cuda":
            held = self.torch.cuda.memory_allocated() - held
        self.picture(pipe, size)
        runs = [self.picture(pipe, size, prompt) for prompt in (0, 1)]
        pipe.disable_xattn()
        ours = min(seconds for _, seconds, _ in runs)
        found = {"ours_s": ours, "stock_s": stock, "stock_graph_s": graph}
        found["C_s"] = min(s for s in found.values() if s is not None)
        found |= {"enable_s": enabling, "enable_bytes": held}
        pipe.to("cpu")
        self.empty()
        return {"row": "computing", "size": size, **found}, [latents for latents, _, _ in runs]

    def budget(
        self, pipe: Any, size: int, vram: float, throttle: float | None, base: dict[str, Any]
    ) -> dict[str, Any]:
        """One row: a budget at a size; `base` has C, B, the copies and the resident latents."""
        from sdx_accel.errors import SdxError
        from sdx_accel.runtime.phase_calls import Job

        row: dict[str, Any] = {"row": "budget", "size": size, "vram": vram, "throttle": throttle}
        if self.held is None or vram < self.held:
            # the row before had a larger budget, and its weights are still there
            self.let_go(pipe)
        self.held = vram
        self.empty()
        with self._sampled(row):
            try:
                pipe.enable_xattn(vram=vram, device=self.device, learn=False)
                session = pipe.__dict__["_sdx_budget"]
                if self.device == "cuda":
                    self._use_link(session, base)
                job = Job(size, size, guided=self.guidance > 1)
                plan = session._plan(session._with_text(job))
                text = plan.to_json()
                row["plan"] = plan.to_dict()
                row["plan_sha256"] = hashlib.sha256(text.encode()).hexdigest()
                row["feasible"] = plan.feasible
                # the prediction stands before the first picture is started
                self.document["next"] = row
                self.write()
                if plan.feasible:
                    self._timed(pipe, session, size, base, row)
                else:
                    row["why"] = plan.shortfall()
            except (SdxError, self.torch.OutOfMemoryError) as error:
                row["error"] = f"{type(error).__name__}: {error}"[:400]
                self.let_go(pipe)
        self.document.pop("next", None)
        if "driver_peak_gib" in row and row.get("feasible"):
            row["peak_error_gib"] = row["predicted_peak_gib"] - row["driver_peak_gib"]
        return row

    def let_go(self, pipe: Any) -> None:
        """Everything on the host, as before the first row."""
        pipe.disable_xattn()
        pipe.to("cpu")
        self.held = None

    def _use_link(self, session: Any, base: dict[str, Any]) -> None:
        """Plan with the link as it was measured here, and copy through it."""
        planner = session._planner
        machine = replace(planner.place.machine, link_bytes_per_s=base["B"])
        planner.place = replace(planner.place, machine=machine)
        session.executor.copies = base["copies"]
        session.change(session.terms)

    def _timed(
        self, pipe: Any, session: Any, size: int, base: dict[str, Any], row: dict[str, Any]
    ) -> None:
        executor = session.executor
        for prompt in (0, 1):
            latents, seconds, whole = self.picture(pipe, size, prompt)
            if not self.torch.equal(latents, base["latents"][prompt]):
                raise AssertionError(f"other bits than the resident run: {row}")
        plan = session.plan
        stream = plan.stream("denoise")
        computing, link = base["C_s"], base["B"]
        row |= {
            "same_plan": plan.digest == row["plan"]["digest"],
            "predicted_peak_gib": plan.predicted_peak_gib,
            "predicted_s_per_step": plan.seconds_per_step,
            "s_per_step": seconds,
            "s_per_picture": whole,
            "C_s": computing,
            "B_gb_per_s": link / 1e9,
            "streamed_gib": 0.0,
            "bound_s": computing,
            "least_bound_s": computing,
            "retries": [str(retry) for retry in executor.retries],
            "unpinned_gib": executor.unpinned_bytes / GIB,
        }
        if stream is not None:
            phase = plan.phase("denoise")
            weights = stream.resident_bytes + stream.streamed_bytes
            largest = max(u.n_bytes for n in stream.components for u in executor.stream_units(n))
            room = plan.budget_gib - plan.machine.non_torch_bytes / GIB - phase.activations_gib
            least = max(0.0, weights - room * GIB + 2 * largest)
            row |= {
                "streamed_gib": stream.streamed_bytes / GIB,
                "bound_s": max(computing, stream.streamed_bytes / link),
                "least_bound_s": max(computing, least / link),
            }
        row["over_bound"] = seconds / row["bound_s"]
        row["over_least_bound"] = seconds / row["least_bound_s"]

    def graphs(self, pipe: Any, rows: list[dict[str, Any]], base: dict[str, Any]) -> None:
        """Adds to rows that stream what a step takes as one CUDA graph.

        After all rows: the driver keeps 20 MiB of each graph, which their peaks would contain.
        """
        for row in rows:
            if row.get("streamed_gib"):
                pipe.enable_xattn(vram=row["vram"], device=self.device, learn=False)
                session = pipe.__dict__["_sdx_budget"]
                self._use_link(session, base)
                row |= self._streamed_graph(pipe, session, row["size"])
                self.write()

    def _streamed_graph(self, pipe: Any, session: Any, size: int) -> dict[str, Any]:
        """A step with its copies inside one CUDA graph; the cap is lifted for the graph's pool."""
        torch = self.torch
        with recorded_calls(pipe) as calls:
            self.picture(pipe, size, 1)
        step = step_of(pipe, calls)
        torch.cuda.set_per_process_memory_fraction(1.0)
        try:
            with torch.no_grad():
                eager = step()[0].cpu()
            seconds, out = graphed(step, lambda: session.executor.streamer.capture_ready())
            if not torch.equal(eager, out):
                raise AssertionError("the graph gives other bits than the eager step")
            return {"graph_s_per_step": seconds}
        except RuntimeError as error:
            return {"graph_error": str(error)[:300]}
        finally:
            session.executor.finish()
            # puts the cap back
            session.change(session.terms)

    @contextmanager
    def _sampled(self, row: dict[str, Any]) -> Iterator[None]:
        """The driver's peak over the block, above what it showed before this process began."""
        if self.device != "cuda":
            yield
            return
        seen: dict[str, Any] = {}
        with sampled(seen):
            yield
        row["driver_peak_gib"] = (seen["peak"] - self.document["idle_bytes"]) / GIB

    def read_idle(self) -> None:
        """What the driver shows before CUDA starts here."""
        from sdx_accel.runtime.probe import read_idle_cards

        self.document["idle_bytes"] = 0
        if self.device == "cuda":
            read_idle_cards()
            row: dict[str, Any] = {}
            with self._sampled(row):
                pass
            self.document["idle_bytes"] = round(row["driver_peak_gib"] * GIB)

    def _peer_budgets(self) -> tuple[float, ...]:
        budgets: tuple[float, ...] = self.options.peer_budgets or self.options.budgets
        return budgets

    def peers(self, pipe: Any, size: int) -> Iterator[dict[str, Any]]:
        """Each other tool at the smallest of the budgets that it works with, cap enforced."""
        yield from other_tools.missing(self.options.kind)
        settings = other_tools.ready(self.options.kind)
        outside = 0
        with tempfile.TemporaryDirectory() as folder:
            # now: group offloading, the last of diffusers' own ways, stays on the pipeline
            failure = other_tools.save(pipe, Path(folder)) if settings else None
            if self.device == "cuda":
                # what the process holds outside torch counts for everyone
                free, total = self.torch.cuda.mem_get_info()
                reserved = self.torch.cuda.memory_reserved()
                outside = total - free - reserved - self.document["idle_bytes"]
                for peer in PEERS:
                    offload(pipe, peer)
                    yield self._smallest(pipe, peer, size, outside)
                self.empty()
            cell = {
                "model": folder,
                "dtype": "fp32" if self.options.tiny else "fp16",
                "device": self.device,
                "size": size,
                "steps": self.steps,
                "guidance": self.guidance,
            }
            for name in settings:
                if failure is not None:
                    yield {"row": "peer", "peer": name, "why": failure}
                    continue
                named = {"setting": name, **cell}
                yield other_tools.smallest(named, self._peer_budgets(), outside)

    def _smallest(self, pipe: Any, peer: str, size: int, outside: int) -> dict[str, Any]:
        torch, row = self.torch, {"row": "peer", "peer": peer, "size": size}
        total = torch.cuda.mem_get_info()[1]
        for vram in sorted(self._peer_budgets()):
            self.empty()
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, max(vram * GIB - outside, 1 << 20) / total)
            )
            try:
                with self._sampled(row):
                    self.picture(pipe, size)
                    latents, seconds, whole = self.picture(pipe, size, 1)
                row |= {"vram": vram, "s_per_step": seconds, "s_per_picture": whole}
                row["latents_sha256"] = other_tools.digest(latents)
                break
            except RuntimeError as error:
                fits = not isinstance(error, torch.OutOfMemoryError)
                row["why"] = f"{error}"[:300] if fits else f"does not fit {vram:g} GiB"
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
            # a model that was refused memory on its way to the card is left on both sides of it
            renew(pipe, peer)
        return row


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rows; the document that was written."""
    bench = Bench(options)
    bench.read_idle()
    pipe = bench.load()
    # 0: the link as it is, beside throttled ones
    throttles = [throttle or None for throttle in options.throttle or (None,)]
    links = {throttle: measure_link(bench.device, throttle) for throttle in throttles}
    for size in options.sizes:
        computing, latents = bench.computing(pipe, size)
        bench.add(computing)
        for throttle, (copies, speed) in links.items():
            base = {"C_s": computing["C_s"], "B": speed, "copies": copies, "latents": latents}
            for vram in options.budgets:
                begin = time.perf_counter()
                row = bench.budget(pipe, size, vram, throttle, base)
                bench.add({**row, "row_s": time.perf_counter() - begin})
            if options.graph and bench.device == "cuda":
                bench.graphs(pipe, bench.rows[-len(options.budgets) :], base)
        bench.let_go(pipe)
    if options.peers:
        for row in bench.peers(pipe, options.sizes[-1]):
            bench.add(row)
    return bench.document


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    found.add_argument("--model", default="random:sdxl-fp16vae")
    found.add_argument("--kind", choices=("plain", "lora", "controlnet"), default="plain")
    found.add_argument(
        "--sizes", type=lambda text: tuple(map(int, text.split(","))), default=(1024,)
    )
    found.add_argument("--budgets", type=_numbers, default=_numbers(BUDGETS), help="GiB")
    found.add_argument("--throttle", type=_numbers, default=(), help="GB/s of the link; 0 = all")
    found.add_argument("--steps", type=at_least_one, default=0, help="a picture; default: 8")
    found.add_argument("--graph", action="store_true", help="also steps as one CUDA graph")
    found.add_argument("--peers", action="store_true", help="also other offloading")
    found.add_argument("--peer-budgets", type=_numbers, default=(), help="default: --budgets")
    found.add_argument("--four-steps", action="store_true", help="4 steps without guidance")
    found.add_argument("--tiny", action="store_true", help="tiny model on the CPU: a dry run")
    return found


def main() -> None:
    """Run the rows, print each, write the JSON."""
    document = run(parser().parse_args())
    sys.exit(any("error" in row for row in document["rows"]))


if __name__ == "__main__":
    main()

"""What is measured on GPUs of one host, by one command: each figure in a process of its own, with a limit of time.

    python -m benchmarks.several_gpus --out FOLDER [--gpus 2] [--only sums,engines,...] [--within SECONDS] [--peer PATH]
        [--try]

The jobs of a group start at once, for most of what a start takes is the host's; then one after another measures. Each
job's lines are in a file of FOLDER as soon as they are printed, and are printed again at its end, shortened. What does
not fit into --within seconds is ended. With --peer, folders that hold vLLM and what it needs, there are jobs in which
vLLM runs. With --try, all of it runs on a CPU with a small model, to see that it can. --gpus 4 and 8 have jobs of their
own, which no such machine has run yet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

_MODULE = (sys.executable, "-m")
# Many at once compute their references.
_PYTEST = ("env", "OMP_NUM_THREADS=2", *_MODULE, "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark")
_TWO = ("--option", "tensor_parallel_size=2", "--option", 'distributed_executor_backend="mp"')
_BY_DATA = ("--option", 'mm_encoder_tp_mode="data"')
_EXPERTS = ("--option", "enable_expert_parallel=true")
# Of tests/gpu/test_ranks.py.
_ROWS = (
    *("llama", "qwen2_5_vl", "qwen3_vl_moe", "llava", "gemma3", "deepseek_v2", "qwen3_5", "glm4v_moe"),
    "deepseek_v3",
    *("qwen2_5_vl-data", "qwen3_vl_moe-experts"),
)
_STAGES = ("llama-stages", "qwen2_5_vl-stages")
_GIB = 2**30


@dataclass(frozen=True)
class Job:
    """A command.

    Attributes:
        name: of its file.
        limit_s: after so many seconds it is ended; if it waits, after so many since it was let go.
        gpus: those that it sees.
        waits: it prints a line when it has started, and measures when a line comes in.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    gpus: str = "0,1"
    waits: bool = False


def _bench(
    name: str, size: str, only: str, causes: str, gpus: str, cache_gib: float, *options: str, limit_s: float = 90
) -> Job:
    """Run benchmarks.gpu; `cache_gib` 0 takes what is free."""
    command = (*_MODULE, "benchmarks.gpu", "--size", size, "--only", only, "--causes", causes, "--wait", *options)
    if cache_gib:
        command += ("--option", f"kv_cache_memory_bytes={int(cache_gib * _GIB)}")
    return Job(name, command, limit_s, gpus, waits=True)


def _oracle(name: str, *rows: str) -> Job:
    tests = (f"tests/gpu/test_ranks.py::test_tokens_equal[{row}]" for row in rows)
    return Job(name, (*_PYTEST, *tests), 300)


def _engines(count: int, folder: Path, gpus: str, requests: int, *more: str, at_once: int = 64) -> Job:
    asked = ("--requests", str(requests), "--no-repeats", "--max-tokens", "64", "--concurrency", str(at_once))
    command = (*_MODULE, "benchmarks.data_parallel", "--model", str(folder / "3B"), "--load-format", "dummy")
    name = f"engines-{count}" if at_once == 64 else f"engines-{count}-of-{at_once}"
    return Job(name, (*command, "--engines", str(count), *asked, *more), 200, gpus)


def _ladder(count: int, fronts: int, folder: Path, at_once: tuple[int, ...] = (64, 128)) -> Job:
    """Ask a server with so many engines and fronts over HTTP; `at_once` is for each engine."""
    clients = ",".join(str(count * each) for each in at_once)
    flags = f"--load-format dummy --max-model-len 4096 -dp {count} -asc {fronts}"
    asked = ("--max-num-seqs", "256", "--side", "448", "--tokens", "64", "--clients", clients)
    load = ("--requests", str(1000 * count), "--load-processes", str(2 + 2 * count), "--serve", flags)
    command = (*_MODULE, "benchmarks.serving", "ladder", "--model", str(folder / "3B"), "--engine", "process")
    return Job(f"http-{count}-{fronts}", (*command, *asked, *load), 240, ",".join(map(str, range(count))))


def jobs_of(gpus: int, folder: Path) -> dict[str, list[Job]]:
    """Return the jobs of a machine with four or eight GPUs by group."""
    cards = ",".join(map(str, range(gpus)))
    tensor = ("--option", f"tensor_parallel_size={gpus}", "--option", 'distributed_executor_backend="mp"')
    dense, moe, causes = "decode,first_token,prefill,text,images", "decode,text,prefill", "decode,rows,prefill"
    room = ("--option", "gpu_memory_utilization=0.95")
    oracle = Job("oracle", (*_PYTEST, "tests/gpu/test_ranks.py", "-k", "not stages"), 600, cards)
    oracle = replace(oracle, command=("env", f"BEHELD_TEST_RANKS={gpus}", *oracle.command))
    return {
        "oracle": [oracle],
        "sums": [Job(f"sums-{gpus}", (*_MODULE, "benchmarks.sums", "--ranks", str(gpus)), 90, cards)],
        "7B": [_bench(f"7B-tp{gpus}", "7B", dense, causes, cards, 0, *tensor, *room, limit_s=200)],
        "32B-one": [_bench("32B-tp1", "32B", dense, causes, "0", 0, *room, limit_s=240)],
        "32B": [_bench(f"32B-tp{gpus}", "32B", dense, f"{causes},new", cards, 0, *tensor, *room, limit_s=200)],
        "glm-tp": [_bench(f"glm-tp{gpus}", "GLM", moe, causes, cards, 0, *tensor, *room, limit_s=240)],
        "glm-ep": [_bench(f"glm-ep{gpus}", "GLM", moe, causes, cards, 0, *tensor, *room, *_EXPERTS, limit_s=240)],
        "towers": [
            _bench(f"towers-weights-{gpus}", "3B", "images", "new", cards, 2.5, *tensor),
            _bench(f"towers-data-{gpus}", "3B", "images", "new", cards, 2.5, *tensor, *_BY_DATA),
        ],
        "engine": [_engines(1, folder, "0", 800)],
        "engines": [_engines(gpus, folder, cards, 800 * gpus)],
        "http-one": [_ladder(1, 1, folder)],
        "http": [_ladder(gpus, gpus, folder)],
    }


def jobs(folder: Path, out: Path, peer: str = "") -> dict[str, list[Job]]:
    """Return the jobs by group; with `peer`, which is put before PYTHONPATH, also those in which vLLM runs."""
    moe, causes, all_of_it = "decode,text,prefill", "decode,rows,prefill", ("--option", "gpu_memory_utilization=0.95")
    dense, vllm = "decode,first_token,prefill,text,images", ("--engine", "vllm")
    theirs = {
        "32B-vllm": [_bench("32B-vllm-tp2", "32B", dense, "", "0,1", 0, *_TWO, *all_of_it, *vllm, limit_s=240)],
        "7B-vllm": [_bench("7B-vllm-tp2", "7B", dense, "", "0,1", 0, *_TWO, *vllm, limit_s=150)],
    }
    ours = {
        "sums": [Job("sums-2048", (*_MODULE, "benchmarks.sums", "--width", "2048"), 60)],
        "engine": [_engines(1, folder, "0", 800)],
        "engines": [_engines(2, folder, "0,1", 1600)],
        "engine-of-256": [_engines(1, folder, "0", 1600, at_once=256)],
        "engines-of-256": [_engines(2, folder, "0,1", 3200, at_once=256)],
        # Needs py-spy.
        "stacks": [_engines(2, folder, "0,1", 600, "--stacks", str(out / "stacks.txt"))],
        "experts": [
            _bench("moe12-tp2", "30B-A3B-12", moe, causes, "0,1", 3.5, *_TWO),
            _bench("moe12-ep2", "30B-A3B-12", moe, causes, "0,1", 3.5, *_TWO, *_EXPERTS),
        ],
        # All three at once leave one GPU too little memory for graphs.
        "experts-one": [_bench("moe12-tp1", "30B-A3B-12", moe, "decode", "0", 7)],
        "towers": [
            _bench("towers-weights", "3B", "images", "new", "0,1", 2.5, *_TWO),
            _bench("towers-data", "3B", "images", "new", "0,1", 2.5, *_TWO, *_BY_DATA),
        ],
        # Two whole models at once need 140 GB on each GPU.
        "experts-whole": [
            _bench("moe-tp2", "30B-A3B", moe, causes, "0,1", 14, *_TWO),
            _bench("moe-ep2", "30B-A3B", moe, causes, "0,1", 14, *_TWO, *_EXPERTS),
        ],
        "experts-tp1": [_bench("moe-tp1", "30B-A3B", moe, causes, "0", 0, *all_of_it)],
        # Two engines at once do not fit while their weights are joined.
        "glm-tp2": [_bench("glm12-tp2", "GLM-12", moe, "decode", "0,1", 3.5, *_TWO)],
        "glm-ep2": [_bench("glm12-ep2", "GLM-12", moe, "decode", "0,1", 3.5, *_TWO, *_EXPERTS)],
        # 100 GiB of weights on each GPU.
        "glm-whole-tp2": [_bench("glm-tp2", "GLM", moe, "decode", "0,1", 0, *_TWO, *all_of_it, limit_s=150)],
        "glm-whole-ep2": [_bench("glm-ep2", "GLM", moe, "decode", "0,1", 0, *_TWO, *all_of_it, *_EXPERTS, limit_s=150)],
        "7B-one": [_bench("7B-tp1", "7B", dense, "", "0", 0, limit_s=150)],
        "7B-two": [_bench("7B-tp2", "7B", dense, f"{causes},new", "0,1", 0, *_TWO, limit_s=200)],
        # One after another: servers that share GPUs would be measured at once.
        **{
            f"http-{engines}-{fronts}": [_ladder(engines, fronts, folder)]
            for engines in (1, 2)
            for fronts in (engines, 4)
        },
        # One GPU needs more than 80 GB, so that 256 sequences fit next to the weights.
        "32B-one": [_bench("32B-tp1", "32B", dense, f"{causes},new", "0", 0, *all_of_it, limit_s=240)],
        "32B-two": [_bench("32B-tp2", "32B", dense, f"{causes},new", "0,1", 0, *_TWO, *all_of_it, limit_s=200)],
        # Two rows to a process, which imports once. A row takes 75 to 115 s where seven processes run at once, most of
        # it its engine's start.
        "oracle": [_oracle(f"oracle-{number}", *_ROWS[number::6]) for number in range(6)],
        "stages": [_oracle(f"oracle-{row}", row) for row in _STAGES],
    }
    path = os.pathsep.join(filter(None, (peer, os.environ.get("PYTHONPATH", ""))))
    return ours | {
        name: [replace(job, command=("env", f"PYTHONPATH={path}", *job.command)) for job in group]
        for name, group in theirs.items()
        if peer
    }


def trials(folder: Path, gpus: int) -> dict[str, list[Job]]:
    """Return jobs of the same form for a CPU, with a process for each of so many GPUs."""
    cpu = ("--option", 'device="cpu"', "--option", "max_model_len=1024")
    engines = _engines(gpus, folder, "", 4 * gpus).command
    tensor = ("--option", f"tensor_parallel_size={gpus}", "--option", 'distributed_executor_backend="mp"')
    return {
        "sums": [
            Job(
                f"sums-{gpus}",
                (*_MODULE, "benchmarks.sums", "--width", "64", "--device", "cpu", "--ranks", str(gpus)),
                150,
            )
        ],
        "engines": [Job(f"engines-{gpus}", tuple(each.replace("3B", "tiny") for each in engines), 200, "")],
        "oracle": [Job("oracle-skipped", (*_PYTEST, "tests/gpu/test_ranks.py"), 100, "")],
        "experts": [
            _bench(f"moe-ep{gpus}", "tiny", "decode", "", "", 0.05, *tensor, *cpu, *_EXPERTS),
            _bench(f"moe-data-{gpus}", "tiny", "first_token", "", "", 0.05, *tensor, *cpu, *_BY_DATA),
        ],
    }


class Runner:
    """Runs jobs, each in a process of its own.

    Args:
        out: folder of the jobs' output.
        until: no job runs longer, by time.monotonic.
    """

    def __init__(self, out: Path, until: float) -> None:
        self._out, self._until = out, until
        self._begun: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, group: list[Job]) -> None:
        """Start a group's jobs, and let those that wait measure one after another, the others first."""
        start = time.monotonic()
        for job in group:
            self._begin(job)
        for job in sorted(group, key=lambda job: job.waits):
            if job.waits:
                self._await_start(job)
                since = time.monotonic()
                self._release(job)
                self._end(job, since)
            else:
                self._end(job, start)

    def _begin(self, job: Job) -> None:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": job.gpus, "PYTHONUNBUFFERED": "1"}
        # Many compile at once.
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
        with (self._out / f"{job.name}.txt").open("wb") as file, (self._out / f"{job.name}.log").open("wb") as log:
            self._begun[job.name] = subprocess.Popen(
                job.command, stdin=subprocess.PIPE, stdout=file, stderr=log, env=environment, start_new_session=True
            )

    def _await_start(self, job: Job) -> None:
        while not (self._out / f"{job.name}.txt").stat().st_size:
            if time.monotonic() > self._until or self._begun[job.name].poll() is not None:
                return
            time.sleep(0.2)

    def _release(self, job: Job) -> None:
        pipe = self._begun[job.name].stdin
        assert pipe is not None
        try:
            pipe.write(b"\n")
            pipe.flush()
        except BrokenPipeError:
            # It has ended; its status is printed.
            return

    def _end(self, job: Job, since: float) -> None:
        process = self._begun[job.name]
        end = min(since + job.limit_s, self._until)
        try:
            status = str(process.wait(max(0.1, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            status = "ended, too slow"
        self._kill(process)
        print(f"== {job.name}: {status}, {time.monotonic() - since:.0f} s", flush=True)
        for line in (self._out / f"{job.name}.txt").read_text(errors="replace").splitlines()[-16:]:
            print(line[:900], flush=True)
        if status != "0":
            for line in (self._out / f"{job.name}.log").read_text(errors="replace").splitlines()[-12:]:
                print(f"   {line[-300:]}", flush=True)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """End a job and its children."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End what still runs."""
        for process in self._begun.values():
            if process.poll() is None:
                self._kill(process)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, choices=(2, 4, 8), default=2)
    parser.add_argument("--only", help="groups or names of jobs; a+b starts a and b at once")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds for all")
    parser.add_argument("--peer", default="", help="folders that hold vLLM and what it needs, with : between them")
    parser.add_argument("--try", action="store_true", dest="trial", help="on a CPU, with a small model")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "beheld-benchmarks")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.peer and (given.gpus != 2 or given.trial):
        parser.error("--peer has jobs for two GPUs alone: leave it out, or --gpus and --try.")
    found = jobs(given.folder, given.out, given.peer) if given.gpus == 2 else jobs_of(given.gpus, given.folder)
    found = trials(given.folder, given.gpus) if given.trial else found
    groups = [name for name in found if name != "stacks" or shutil.which("py-spy")]
    wanted = groups if given.only is None else given.only.split(",")
    # A name joins groups by +, or is one job of a group.
    chosen = [
        [
            job
            for name in together.split("+")
            for group, each in found.items()
            for job in each
            if name in (group, job.name)
        ]
        for together in wanted
    ]
    if any(job.name.startswith(("engine", "http")) for group in chosen for job in group):
        from benchmarks.shapes import checkpoint

        checkpoint("tiny" if given.trial else "3B", given.folder)
    until = time.monotonic() + given.within
    runner = Runner(given.out, until)
    try:
        for group in chosen:
            runner.run(group)
    finally:
        runner.close()


if __name__ == "__main__":
    main()

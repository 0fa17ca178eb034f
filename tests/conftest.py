"""Settings of every test: no network, one thread, no progress bars; set before any library reads them."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.long import LONG

# Sums in one order give the same last bits on every machine, and test processes side by side do not fight for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Nothing is left in the home folder, and no test depends on what an earlier one compiled.
os.environ.setdefault("BEHELD_CODE_CACHE", "0")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# Each run of CI tries the same examples, so that a change fails by what it changed; long forms draw others each time.
settings.register_profile("beheld", derandomize=not LONG)
settings.load_profile("beheld")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a test (or a command that it runs) says by our variables does not reach the next test's processes.

    Nor does the level of the log, which a command takes from them.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith(("BEHELD_", "VLLM_"))}
    level = logging.getLogger("beheld").level
    yield
    if level != logging.NOTSET:
        logging.getLogger("beheld").setLevel(level)
    for name in [name for name in os.environ if name.startswith(("BEHELD_", "VLLM_"))]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)


# Folders whose tests mostly wait: for processes that they start, for time to pass, for a server's answer.
WAITING = tuple(f"tests/{name}/" for name in ("cluster", "compat", "examples", "executor", "jobs", "sandbox", "server"))

# Tests of which some bound seconds, within which other threads or processes have to answer.
TIMED = (
    *(
        f"tests/{name}/"
        for name in ("api", "checkpoint", "encoders", "engine", "inputs", "parallel", "structured", "utils")
    ),
    "tests/test_census.py",
)

# Family -> the names that documents and users have for it: `pytest -k NAME` finds its tests by these, too.
OTHER_NAMES = {
    "blip2": ("blip-2",),
    "cohere2_vision": ("command_a_vision",),
    "ernie4_5_vl_moe": ("ernie45_vl",),
    "glm46v": ("glm4_6v",),
    "glm4v": ("glm4_1v",),
    "glm4v_moe": ("glm4_5v",),
    "glm4v_moe_fp8": ("glm4_5v_fp8",),
    "llava_next": ("llava-next",),
    "llava_next_video": ("llava-next-video",),
    "llava_onevision": ("llava-onevision",),
}


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let tests of one family be found by its other names."""
    given = getattr(getattr(item, "callspec", None), "params", {}).values()
    for family in given:
        if isinstance(family, str):
            item.extra_keyword_matches.update(OTHER_NAMES.get(family, ()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long forms take longer than any test may otherwise: the soak alone asks for a quarter of an hour.

    Where two cores are busy, other threads and processes may answer later than a test waits: such a test has a second
    attempt. The report names it and shows what failed. Tests of numbers have none.
    """
    for item in items:
        if LONG:
            item.add_marker(pytest.mark.timeout(7200))
        elif item.nodeid.startswith(WAITING + TIMED):
            item.add_marker(pytest.mark.flaky(reruns=1))


class Turns:
    """Lets a test that measures time have the machine alone, among the processes of one run.

    Every test holds one lock, shared or, alone, exclusively. A second lock is held while waiting for the first, so that
    those that share it do not keep it from one that waits.
    """

    def __init__(self, folder: Path) -> None:
        self._gate, self._lock = ((folder / name).open("w+") for name in ("gate", "lock"))

    @contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """Within the block no test runs beside, if `alone`; else none that is alone."""
        fcntl.lockf(self._gate, fcntl.LOCK_EX)
        fcntl.lockf(self._lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.lockf(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)


@pytest.fixture(scope="session")
def turns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Turns | None:
    """The run's, whose processes have folders side by side; None if it has one process."""
    return Turns(tmp_path_factory.getbasetemp().parent) if hasattr(request.config, "workerinput") else None


@pytest.fixture(autouse=True)
def one_at_a_time(request: pytest.FixtureRequest, turns: Turns | None) -> Iterator[None]:
    """Tests marked `alone` compute alone."""
    with nullcontext() if turns is None else turns.turn(alone=request.node.get_closest_marker("alone") is not None):
        yield


# It wants the machine for itself, so it comes when nothing else is left that could run meanwhile.
ALONE = "tests/server/test_overload.py"

# Files that take long for their number of tests, the longest first. Others come by their number of tests, and one of
# these at the end would keep a process at work when the others have none.
LASTING = (
    "tests/compat/test_documents.py",
    "tests/api/test_sleep.py",
    "tests/server/test_three_fronts.py",
    "tests/checkpoint/test_generated_damage.py",
    "tests/attention/test_triton.py",
    "tests/server/test_soak.py",
    "tests/models/test_latent_row.py",
    "tests/server/test_lifecycle.py",
    "tests/server/test_weight_checker.py",
    "tests/compat/test_installed.py",
    "tests/server/test_fuzz.py",
    "tests/executor/test_ranks.py",
    "tests/oracle/test_ranks.py",
    "tests/server/test_fronts.py",
    "tests/examples/test_examples.py",
    "tests/quant/test_written_gguf.py",
    "tests/api/test_interrupts.py",
    "tests/server/test_killable.py",
    "tests/server/test_transcriptions.py",
    "tests/server/test_data_parallel.py",
    "tests/attention/test_shared_memory.py",
    "tests/attention/test_hopper_prefill.py",
    "tests/api/test_start.py",
    "tests/inputs/test_threads.py",
    "tests/server/test_process.py",
    "tests/test_house.py",
    "tests/inputs/test_workers.py",
    "tests/cli/test_cli.py",
    "tests/models/test_gated_row.py",
    "tests/runner/test_drafts.py",
    "tests/models/test_route_row.py",
    "tests/lora/test_oracle.py",
    "tests/quant/test_rank_parts.py",
    "tests/server/test_http_protocol.py",
    "tests/engine/test_retry.py",
    "tests/pool/test_encoders.py",
    "tests/checkpoint/test_damaged.py",
    "tests/server/test_rank_kills.py",
    "tests/verify/test_verify.py",
    "tests/runner/test_mixed_engine.py",
    "tests/platform/test_jit.py",
    "tests/api/test_async_llm.py",
    "tests/inputs/test_taken.py",
    "tests/engine/test_sentinel.py",
    "tests/server/test_documents.py",
    "tests/server/test_operator.py",
    "tests/engine/test_crowd.py",
    "tests/sample/test_sampler.py",
    "tests/scheduler/test_machine.py",
    "tests/engine/test_redone.py",
    "tests/jobs/test_metrics_port.py",
    "tests/models/test_operations.py",
    "tests/attention/test_launches.py",
    "tests/api/test_preemption_metrics.py",
    "tests/models/test_one_row.py",
    "tests/engine/test_soak.py",
    "tests/sample/test_kernels.py",
)

# How much lower the priority of every process but the first is, which xdist calls so.
NICE, FIRST = 5, "gw0"


def next_scope(queued: Iterable[str], *, first: bool) -> str:
    """The scope that a process takes next: the first one what waits, as long as there is any, the others what computes.

    Two files that start servers keep each other from the cores, and then both wait while no core computes.
    """
    scopes = [scope for scope in queued if scope != ALONE] or list(queued)
    scopes = [scope for scope in scopes if scope.startswith(WAITING) == first] or scopes
    return next((scope for scope in LASTING if scope in scopes), scopes[0])


def first_of(nodes: Sequence[Any]) -> Any:
    """The process whose priority is not lowered; the order of `nodes` is that in which they became ready."""
    return next((node for node in nodes if node.gateway.id == FIRST), nodes[0])


def pytest_configure(config: pytest.Config) -> None:
    """Leave the cores to the first of several processes, whose tests wait for what they start until a deadline.

    So a process more than there are cores computes whenever the first one waits, and does not slow it down.
    """
    if getattr(config, "workerinput", {"workerid": FIRST})["workerid"] != FIRST:
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Side by side (`-n 3`), a process takes a whole file, whose tests share engines; of the oracle, a family of it."""
    from xdist.scheduler import LoadScopeScheduling

    class FilesAndFamilies(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path, _, test = nodeid.partition("::")
            if path.startswith("tests/oracle/") and not path.endswith("/test_ranks.py"):
                # All of a family in one process: transformers' answers are computed once. Ranks are forked from a
                # process that their file starts, which takes longer.
                return "tests/oracle " + test.partition("[")[2].rstrip("]").partition("-")[0]
            return path

        def _assign_work_unit(self, node: Any) -> None:
            first = node is first_of(self.nodes)
            self.workqueue.move_to_end(next_scope(self.workqueue, first=first), last=False)
            super()._assign_work_unit(node)

    return FilesAndFamilies(config, log)


def pytest_collection() -> None:
    """Nothing that is collected is garbage: looking for it took a quarter of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Thousands of tests and the libraries they imported stay: walked through by every full collection, they cost a
    fifth of some folders' time."""
    gc.enable()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Some extension modules complain about objects that are never collected."""
    gc.unfreeze()

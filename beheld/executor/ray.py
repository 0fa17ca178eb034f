"""The executor of ranks on several hosts, which Ray places; the first is in the caller's process."""

from __future__ import annotations

from beheld.cluster.remote import Placement, start
from beheld.cluster.tunnel import TunnelDoor
from beheld.core.config import EngineConfig
from beheld.executor.multi import MultiExecutor, Placed
from beheld.executor.watchdog import RankProcess
from beheld.executor.wire import CODEC
from beheld.parallel.meeting import Port
from beheld.platform.registry import platform_of
from beheld.wire.stream_link import StreamLink


class RayExecutor(MultiExecutor):
    """Runs plans on all ranks; each has a GPU of the cluster, or on CPUs a core."""

    @classmethod
    def place(cls, config: EngineConfig) -> Placed:
        """See MultiExecutor."""
        wanted = Placement(
            "beheld.executor.rank:main_elsewhere",
            config.num_ranks - 1,
            gpus_each=1 if platform_of(config.device).splits else 0,
            with_caller=True,
            asking=f"distributed_executor_backend='ray' with {config.num_ranks} ranks",
            param="distributed_executor_backend",
        )
        group = start(wanted)
        ranks = [
            RankProcess(process.number, process, StreamLink(end, CODEC))
            for process, end in zip(group.processes, group.ends, strict=True)
        ]
        doors: list[TunnelDoor] = []

        def lead(port: int) -> str:
            doors.append(TunnelDoor(group.address, group.token, port))
            return str(doors[-1].port)

        def ended() -> None:
            for each in doors:
                each.close()
            group.release()

        return Placed(ranks, lambda: Port.opened(group.address, lead), ended)

"""Messages between processes of a router, over a real pair of sockets."""

from __future__ import annotations

import asyncio
import socket

from segue.router.fleet import Held
from segue.router.process_link import ProcessLink
from segue.router.process_messages import EndServing, FromProcess, HeldElsewhere, ProcessReport, ToProcess
from tests.router.fake_servers import run


def test_messages_arrive_in_order_and_then_the_end() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        here: ProcessLink[FromProcess] = await ProcessLink.open(ours, FromProcess)
        there: ProcessLink[ToProcess] = await ProcessLink.open(theirs, ToProcess)
        sent = [HeldElsewhere(held={f"worker-{i}": Held(i, 2, 3)}) for i in range(3000)]
        for each in sent:
            here.send(each)
        here.send(EndServing(drain_s=1.5))
        assert [await there.receive() for _ in sent] == sent
        assert await there.receive() == EndServing(drain_s=1.5)
        report = ProcessReport(version=7)
        report.counters.requests["worker", "cut"] = 2
        there.send(report)
        assert await here.receive() == report
        await there.close()
        assert await here.receive() is None
        here.send(EndServing(drain_s=0))  # to nobody
        await asyncio.sleep(0)
        await here.close()

    run(test())

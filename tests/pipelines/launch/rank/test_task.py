"""What a task passes on between the driver and its rank, with processes that only the test has."""

import queue
from types import SimpleNamespace
from typing import Any

from pipelines.launch.rank.task import _RunningRank
from pipelines.launch.wire.encoding import encode
from pipelines.launch.wire.messages import Join, Order, ProcessDied, ReadyToJoin


def fake_process() -> Any:
    orders: list[Order] = []
    return SimpleNamespace(
        orders=orders, order=orders.append, exit_code=-9, death=lambda: "killed by SIGKILL", faults=str
    )


def test_an_order_to_join_waits_until_the_spare_is_ready_and_counts_once() -> None:
    """The rank has died while the order was on its way: the spare's own readiness is answered by that order."""
    first, second, sent = Join({"RENDEZVOUS": "first"}), Join({"RENDEZVOUS": "second"}), []
    orders: queue.Queue[Order] = queue.Queue()
    link: Any = SimpleNamespace(orders=orders, send=sent.append)
    dead, spare = fake_process(), fake_process()
    processes: Any = SimpleNamespace(
        can_replace=True, log=SimpleNamespace(last_lines=list), current=dead, prepare_spare=lambda: None
    )

    def replace() -> Any:
        processes.current = spare
        return dead

    processes.replace = replace
    rank = _RunningRank(processes, link, 1, 60)

    rank._take(encode(ReadyToJoin(0)))
    orders.put(first)
    rank._obey()
    assert dead.orders == [first]
    rank._take(encode(ReadyToJoin(3)))
    assert rank._is_replaced()
    orders.put(second)
    rank._obey()
    assert spare.orders == [], "it has not come so far"
    rank._take(encode(ReadyToJoin(3)))
    assert spare.orders == [second]
    assert sent == [
        ReadyToJoin(0),
        ReadyToJoin(3, joins=1),
        ProcessDied("killed by SIGKILL", -9, "", []),
        ReadyToJoin(3, joins=1),
    ]

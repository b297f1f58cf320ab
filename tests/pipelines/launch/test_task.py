"""What a task passes on between the driver and its rank, with processes that only the test has."""

import queue
from types import SimpleNamespace
from typing import Any, cast

from pipelines.launch.link import Link
from pipelines.launch.messages import Fallen, Join, Order, Ready, encode
from pipelines.launch.processes import RankProcesses
from pipelines.launch.task import _RunningRank


class FakeProcess:
    def __init__(self) -> None:
        self.orders: list[Any] = []
        self.exit_code = -9

    def order(self, order: Any) -> None:
        self.orders.append(order)

    def death(self) -> str:
        return "killed by SIGKILL"

    def faults(self) -> str:
        return ""


class FakeProcesses:
    can_replace = True
    log = SimpleNamespace(last_lines=list)

    def __init__(self) -> None:
        self.current = FakeProcess()

    def replace(self) -> FakeProcess:
        dead, self.current = self.current, FakeProcess()
        return dead

    def prepare_spare(self) -> None:
        pass


def test_an_order_to_join_waits_until_the_spare_is_ready_and_counts_once() -> None:
    """The rank has died while the order was on its way: the spare's own readiness is answered by that order."""
    first, second = Join({"RENDEZVOUS": "first"}), Join({"RENDEZVOUS": "second"})
    sent: list[Any] = []
    orders: queue.Queue[Order] = queue.Queue()
    processes = FakeProcesses()
    link = cast(Link, SimpleNamespace(orders=orders, send=sent.append))
    rank = _RunningRank(cast(RankProcesses, processes), link, 1, 60)

    rank._take(encode(Ready(0)))
    orders.put(first)
    rank._obey()
    assert processes.current.orders == [first]
    rank._take(encode(Ready(3)))
    assert rank._is_replaced()
    orders.put(second)
    rank._obey()
    assert processes.current.orders == [], "it has not come so far"
    rank._take(encode(Ready(3)))
    assert processes.current.orders == [second]
    fallen = Fallen("killed by SIGKILL", -9, "", [])
    assert sent == [Ready(0), Ready(3, joins=1), fallen, Ready(3, joins=1)]

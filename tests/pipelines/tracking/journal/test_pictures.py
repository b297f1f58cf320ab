import threading
from unittest.mock import Mock

from matplotlib.figure import Figure

from pipelines.tracking.journal import pictures
from pipelines.tracking.journal.pictures import Pictures
from tests.patience import patient


def test_the_newest_version_of_each_picture_is_drawn_at_the_end(monkeypatch) -> None:
    monkeypatch.setattr(pictures, "LARGEST_COST", -1.0)  # no time for drawing beside training
    drawn: dict[str, tuple[int, object]] = {}
    made = Pictures(lambda figure, path, step: drawn.update({path: (step, figure.get_label())}))

    def labelled(text: str) -> Figure:
        figure = Figure()
        figure.set_label(text)
        return figure

    for step in (1, 2, 3):
        made.order("curves.png", lambda step=step: labelled(f"of step {step}"), after_step=step)
    made.order("bars.png", lambda: labelled("bars"), after_step=2)
    assert drawn == {}
    made.finish()
    assert drawn == {"curves.png": (3, "of step 3"), "bars.png": (2, "bars")}
    made.order("curves.png", lambda: labelled("again"), after_step=4)
    made.finish()
    assert drawn["curves.png"] == (4, "again")


def test_a_picture_is_drawn_beside_training_and_an_error_stops_nothing() -> None:
    done = threading.Event()
    made = Pictures(lambda figure, path, step: done.set())

    made.order("a.png", Mock(side_effect=ValueError("no such column")), after_step=0)
    made.order("b.png", Figure, after_step=0)
    assert done.wait(patient(60))
    made.finish()

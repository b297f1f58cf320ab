"""The settings of the learning rate's schedule."""

from pydantic import Field

from conf.section import Section


class Milestone(Section):
    """From this point of the run, the learning rate is the peak times `factor`."""

    epoch: float = Field(gt=0)
    """Epochs done, in a run of `schedule.recipe_epochs`."""
    factor: float = Field(gt=0)
    """Factor of the peak learning rate, not of the rate before."""


class ScheduleConfig(Section):
    """Learning rate over the run, a pure function of the step."""

    warmup_epochs: float = Field(default=5, ge=0)
    """Epochs in which the learning rate rises to its peak, every step."""
    recipe_epochs: float = Field(default=90, gt=0)
    """Length of the run that the milestones are stated for; in a shorter run they come proportionally earlier."""
    milestones: list[Milestone] = Field(
        default=[
            Milestone(epoch=30, factor=0.1),
            Milestone(epoch=60, factor=0.01),
            Milestone(epoch=80, factor=0.001),
        ]
    )
    """Milestones in rising order; an empty list keeps the peak."""

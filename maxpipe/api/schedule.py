"""Build, verify, draw and write pipeline schedules, without jax."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self, get_args

from maxpipe.api.arguments import argument_error, check_instance, check_integer, check_path
from maxpipe.schedule import draw, orders, pictures, table
from maxpipe.schedule.catalog import FILE_PREFIX, SCHEDULES, check_num_forwards, make_schedule
from maxpipe.schedule.orders import read_orders
from maxpipe.schedule.placement import place_orders
from maxpipe.schedule.table import Action, ActionKind, Costs, Ring
from maxpipe.schedule.verify import verify

Actions = Sequence[Sequence[Action | tuple[ActionKind, int, int]]]
"""Actions of each stage in execution order. An action is (type, microbatch, repeat), where the type
is F (forward), B (backward), or I and W (input and weight gradients)."""


class Schedule(table.Schedule):
    """A verified pipeline schedule: the action of each stage in each tick.

    A notebook shows the diagram of the schedule.
    """

    @classmethod
    def named(
        cls,
        name: str,
        *,
        stages: int,
        microbatches: int,
        repeats: int | None = None,
        group: int = 0,
        delayed: bool = False,
    ) -> Self:
        """Build a schedule by its name, or from a CSV file with the name `file:PATH`.

        Args:
            name: value of `pipeline.schedule`, such as `1f1b`, `interleaved` or `zb_v`.
            stages: number of pipeline stages (P).
            microbatches: number of microbatches per step (M).
            repeats: number of passes of a microbatch through each stage (R); the default is the
                number that the schedule requires or implies, or 1.
            group: microbatches per group of `interleaved`; 0 selects the number of stages.
            delayed: whether a message may need two ticks.

        Raises:
            ConfigError: the name is unknown, or the schedule does not support these sizes.
        """
        check_instance("Schedule.named: name", name, str, "must be a string.", "Pass '1f1b'.")
        stages = check_integer("Schedule.named: stages", stages)
        microbatches = check_integer("Schedule.named: microbatches", microbatches)
        group = check_integer("Schedule.named: group", group, 0)
        if repeats is None:
            repeats = default_repeats(name) or 1
        repeats = check_integer("Schedule.named: repeats", repeats)
        check_num_forwards("Schedule.named", stages, repeats, microbatches)
        return cls.of(
            make_schedule(
                name,
                stages=stages,
                repeats=repeats,
                microbatches=microbatches,
                group=group,
                delayed=delayed,
            )
        )

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> Self:
        """Read and verify a schedule from a CSV file with one line per stage.

        A cell such as `2F0` is the forward pass of chunk 2 for microbatch 0. Source of the format:
        torch.distributed.pipelining.

        Raises:
            ConfigError: the file cannot be read, or the schedule is not complete.
        """
        check_path("Schedule.from_csv: path", path, "the path of a CSV file", "Pass 'order.csv'.")
        ring, actions = read_orders(Path(path))
        count = 1 + max(action.microbatch for order in actions for action in order)
        return cls.named(
            f"{FILE_PREFIX}{os.fspath(path)}",
            stages=ring.num_stages,
            microbatches=count,
            repeats=ring.num_repeats,
        )

    @classmethod
    def from_actions(
        cls, name: str, actions: Actions, *, shape: str = "loop", delayed: bool = False
    ) -> Self:
        """Build and verify a schedule from the execution order of the actions on each stage.

        Ticks, messages and buffers follow from the order.

        Args:
            name: name of the schedule in drawings and messages.
            actions: actions of each stage (P lists).
            shape: `loop`, or `v` if every second repeat passes the stages in reverse order.
            delayed: whether a message needs two ticks.

        Raises:
            OrderError: the order causes a deadlock.
            ConfigError: an argument has another type.
            ScheduleError: an action is missing or repeated.
        """
        check_instance("Schedule.from_actions: name", name, str, "must be a string.", "Pass 'own'.")
        if shape not in ("loop", "v"):
            rule = "must be loop or v."
            raise argument_error("Schedule.from_actions: shape", shape, rule, "Pass 'loop'.")
        named = _read_actions(actions)
        flat = [action for stage in named for action in stage]
        repeats = 1 + max((action.repeat for action in flat), default=0)
        count = 1 + max((action.microbatch for action in flat), default=0)
        check_num_forwards("Schedule.from_actions", len(named), repeats, count)
        ring = Ring(len(named), repeats, "v" if shape == "v" and len(named) > 1 else "loop")
        placed = place_orders(
            name, ring, named, num_microbatches=count, group=count, delayed=delayed
        )
        verify(placed)
        return cls.of(placed)

    @classmethod
    def of(cls, schedule: table.Schedule) -> Self:
        """Return a schedule with the methods of this class, for example of a `Trainer`."""
        names = [field.name for field in dataclasses.fields(table.Schedule)]
        return cls(**{name: getattr(schedule, name) for name in names})

    def verify(self) -> None:
        """Check that the table executes the network correctly. Constructors call this method.

        Raises:
            ScheduleError: a cell is wrong. The message shows the cell in the timeline.
        """
        verify(self)

    def text(self, costs: Costs = draw.EQUAL_COSTS, *, width: int = 0) -> str:
        """Return the timeline as text, in blocks of at most `width` columns (0: a single block).

        `costs` are the relative times of a forward pass, an input gradient and a weight gradient.
        """
        return draw.draw_timeline(self, costs, width=width)

    def svg(self, costs: Costs = draw.EQUAL_COSTS) -> str:
        """Return the diagram as SVG; see `text` for `costs`."""
        return pictures.svg(self, costs)

    def csv(self) -> str:
        """Return the actions as CSV text, which `from_csv` and `pipeline.schedule=file:PATH`
        accept.
        """
        return orders.to_csv(self)

    def __str__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str:
        return self.svg()


def _read_actions(actions: Actions) -> list[list[Action]]:
    """Return the actions of each stage.

    Raises:
        ConfigError: an element is not an action, or a stage has no actions.
    """
    where, action = "Schedule.from_actions: actions", "Pass [[('F', 0, 0), ('B', 0, 0)]]."
    rule = "must be one list of actions for each stage, and a stage must have an action."
    if not _is_list(actions) or not actions or not all(map(_is_list, actions)) or not all(actions):
        raise argument_error(where, actions, rule, action)
    named = []
    for number, stage in enumerate(actions):
        for each in stage:
            is_action = _is_list(each) and len(each) == 3 and each[0] in get_args(ActionKind)
            if not is_action:
                rule = "must be (type, microbatch, repeat) with the type F, B, I or W."
                raise argument_error(f"{where}[{number}]", each, rule, action)
        place = f"{where}[{number}]: "
        named.append(
            [
                Action(
                    kind,
                    check_integer(f"{place}microbatch", microbatch, 0),
                    check_integer(f"{place}repeat", repeat, 0),
                )
                for kind, microbatch, repeat in stage
            ]
        )
    return named


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def default_repeats(name: str) -> int | None:
    """Return the required or implied number of repeats of a schedule; None if any number works.

    Raises:
        ConfigError: `name` is `file:PATH`, and the file cannot be read.
    """
    if name.startswith(FILE_PREFIX):
        return read_orders(Path(name.removeprefix(FILE_PREFIX)))[0].num_repeats
    spec = SCHEDULES.get(name)
    return spec and spec.repeats

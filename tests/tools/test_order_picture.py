"""The picture of a step's order is that of the program as it is."""

from pathlib import Path

import pytest

from tools.order_picture import SHOWN, Operation, draw, place, record

PICTURE = Path(__file__).parents[2] / "gpu" / "step_order.svg"


@pytest.fixture(scope="module")
def operations() -> list[Operation]:
    return record()


def test_the_checked_in_picture_is_current(operations: list[Operation]) -> None:
    """If not: python -m tools.order_picture gpu/step_order.svg"""
    assert PICTURE.read_text() == draw(operations)


def test_it_shows_that_the_next_steps_table_writes_run_under_the_model(operations: list[Operation]) -> None:
    place(operations)
    step = {(o.name, o.step): o for o in operations}
    model, writes, gather = step["model", SHOWN[0]], step["slot writes", SHOWN[1]], step["gather", SHOWN[0]]
    assert gather.x + gather.width < writes.x < model.x + model.width


def test_without_the_fence_the_picture_is_another_one(operations: list[Operation]) -> None:
    for operation in operations:
        operation.waits = [wait for wait in operation.waits if wait[0] != "fence"]
    assert PICTURE.read_text() != draw(operations)

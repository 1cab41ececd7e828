"""The scheduler's benchmark: it drives the real loop with every row running, and its table is plain."""

import pytest

from tools.bench_scheduler import Cost, main, measure, table


def test_a_step_of_many_rows_costs_about_as_much_as_one_of_a_single_row() -> None:
    one, many = measure(1, 60), measure(128, 60)
    assert 0 < one.median_us <= one.p95_us
    assert many.median_us < 16 * one.median_us, "work by the row"


def test_the_table_is_about_the_first_line() -> None:
    lines = table([Cost(1, 10, 50.0, 61.25), Cost(64, 10, 75.0, 80.0)]).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["1", "10", "50.0", "61.2", "1.00"],
        ["64", "10", "75.0", "80.0", "1.50"],
    ]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "2", "3", "--steps", "20"])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [["2", "20"], ["3", "20"]]

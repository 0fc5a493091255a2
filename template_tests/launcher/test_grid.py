"""How a grid is read."""

import pytest

from slurm import grid
from slurm.errors import LaunchError


def read(text: str) -> list[str]:
    return [str(point) for point in grid.points(text, "g")]


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("a=1,2 b=3", ["a=1 b=3", "a=2 b=3"]),
        ("--a=1,2", ["a=1", "a=2"]),
        ("a=[1,2],[3, 4]", ["a=[1,2]", "a=[3, 4]"]),
        ("a=[[1,2],[3,4]],[]", ["a=[[1,2],[3,4]]", "a=[]"]),
        ("a={b: 1, c: 2},{b: 2}", ["a={b: 1, c: 2}", "a={b: 2}"]),
        ("a='x, y',z", ["a=x, y", "a=z"]),
        ('a="it\'s",b', ["a=it's", "a=b"]),
        ("a=b=c,d", ["a=b=c", "a=d"]),
        ("a=007,1e-3,2:59:00,true b.c=0.10", [f"a={value} b.c=0.10" for value in ("007", "1e-3", "2:59:00", "true")]),
    ],
)
def test_commas_in_brackets_and_quotes_separate_nothing(text: str, points: list[str]) -> None:
    """Lists, dictionaries and sentences are values like others."""
    assert read(text) == points


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a=[1,2", "close every bracket and quote"),
        ("a='1,2", "close every bracket and quote"),
        ("a=1],[2", "expected"),
        ("a=", "expected"),
        ("", "expected"),
        ("a=1,,2", "expected"),
        ("a", "expected"),
        ("trainer.devices=1,2", "trainer.devices is the same in all runs of a grid"),
        ("run=a,b", "run is the same in all runs of a grid"),
        ("a=1 a=2", "same name twice"),
    ],
)
def test_what_cannot_be_a_grid_is_one_line(text: str, said: str) -> None:
    """Also what would be read and then not used: all runs of an array have one shape."""
    with pytest.raises(LaunchError) as caught:
        read(text)
    assert said in str(caught.value)

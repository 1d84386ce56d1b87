"""The train_dataloader bucket: whom to ask for the position, and what happens where nobody knows."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hyper_resume.state.dataloader import apply_dataloader, collect_dataloader


class Loader:
    """A loader with a position."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Iterator(Loader):
    """An iterator that may or may not know its position."""

    def __init__(self, position: int, *, has_state: bool) -> None:
        super().__init__(position)
        self.has_state = has_state


def test_the_iterator_is_asked_before_the_loader_that_has_read_ahead() -> None:
    assert collect_dataloader(Iterator(3, has_state=True), Loader(7)) == {"position": 3}


def test_an_iterator_without_a_state_leaves_the_answer_to_the_loader() -> None:
    assert collect_dataloader(Iterator(3, has_state=False), Loader(7)) == {"position": 7}
    assert collect_dataloader(None, Loader(7)) == {"position": 7}
    assert collect_dataloader(iter([]), Loader(7)) == {"position": 7}


def test_a_loader_without_a_state_gives_none_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert collect_dataloader(None, [1, 2]) is None
    assert "this epoch will be replayed from its start" in caplog.text


def test_a_position_is_put_back() -> None:
    loader = Loader(0)
    assert apply_dataloader(loader, {"position": 5}) is True
    assert loader.position == 5


@pytest.mark.parametrize(
    ("loader", "saved", "message"),
    [
        (Loader(0), None, "the checkpoint holds no data position"),
        ([1, 2], {"position": 5}, "the dataloader has no load_state_dict"),
    ],
)
def test_a_position_that_cant_be_put_back_is_a_warning(
    loader: Any, saved: dict[str, Any] | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert apply_dataloader(loader, saved) is False
    assert message in caplog.text
    assert "this epoch is replayed from its start" in caplog.text

"""The board on its own: what is written, what is seen, who is level."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from labsupport.ranks.board import NUM_SLOTS, POINT_TO_POINT, SLOT_BYTES, Board, _slot_of
from labsupport.ranks.errors import CollectiveMismatch


@contextmanager
def standing(board: Board, group: str, *, members: list[int], call: str) -> Iterator[None]:
    slot = board.enter(group, members=members, call=call)
    yield
    board.leave(slot, "done")


@pytest.fixture
def boards(tmp_path: Path) -> list[Board]:
    """The owner's view, then those of three ranks."""
    path = tmp_path / "board"
    return [Board(path, rank=rank, world_size=3) for rank in (None, 0, 1, 2)]


ALL = [0, 1, 2]


def test_equal_calls_leave_the_ranks_level(boards: list[Board]) -> None:
    owner, *ranks = boards
    assert owner.is_level()
    for call in range(3 * NUM_SLOTS):
        for board in ranks:
            with standing(board, "WORLD", members=ALL, call=f"barrier {call}"):
                pass
    assert owner.is_level()
    assert owner.current(2).call == f"barrier {3 * NUM_SLOTS - 1}"
    assert owner.find(0, "WORLD", 1) is None  # long overwritten
    assert owner.last_sequence(0, "WORLD") == 3 * NUM_SLOTS
    assert owner.last_sequence(0, "other") == 0


def test_the_second_to_come_sees_the_difference(boards: list[Board]) -> None:
    owner, first, second, _ = boards
    with standing(first, "WORLD", members=ALL, call="barrier()"):
        assert owner.current(0).state == "inside"
        with (
            pytest.raises(CollectiveMismatch, match=r"collective 1: rank 0 calls barrier\(\)"),
            standing(second, "WORLD", members=ALL, call="gather()"),
        ):
            pytest.fail("the call must not be made")
    assert owner.current(1).state == "failed"
    assert not owner.is_level()
    for board in boards[1:]:
        board.reset_row()
    assert owner.is_level()


def test_groups_and_peers_count_apart(boards: list[Board]) -> None:
    owner, first, second, _ = boards
    with standing(first, "sub", members=[0], call="a"):
        pass
    for board in (first, second, boards[3]):
        with standing(board, "WORLD", members=ALL, call="b"):
            pass
    for _ in range(2 * NUM_SLOTS):
        with standing(second, POINT_TO_POINT, members=[0, 1], call="send"):
            pass
    assert owner.is_level()
    with standing(first, "WORLD", members=ALL, call="c"):
        pass
    assert not owner.is_level()


def test_many_groups_push_out_notes_but_not_counts(boards: list[Board]) -> None:
    """As on a mesh of several axes: the ranks stay level, whatever note is overwritten."""
    owner, *ranks = boards
    groups = {"WORLD": [0, 1, 2], "tp": [0, 1], "dp": [1, 2], "cp": [0, 2]}
    for step in range(3 * NUM_SLOTS):
        for name, members in groups.items():
            for member in members:
                with standing(ranks[member], name, members=members, call=f"{name} {step}"):
                    pass
        assert owner.is_level(), step
    assert owner.last_sequence(2, "dp") == 3 * NUM_SLOTS
    with standing(ranks[1], "dp", members=[1, 2], call="one more"):
        pass
    assert not owner.is_level()


def test_a_note_that_is_being_rewritten_is_no_note(boards: list[Board]) -> None:
    """A reader that copies half of the old and half of the new must not believe either."""
    owner, first, *_ = boards
    for call in ("all_reduce([128, 128])", "all_reduce([128, 384])"):
        with standing(first, "WORLD", members=ALL, call=call):
            pass
    old, new = (owner.find(0, "WORLD", sequence) for sequence in (1, 2))
    assert old is not None
    assert new is not None
    slot_of_new = (_slot_of("WORLD", 2) + 1) * SLOT_BYTES
    torn = owner._map.find(b"[128, 384]", slot_of_new)
    owner._map[torn : torn + 10] = b"[128, 128]"
    assert owner.find(0, "WORLD", 2) is None
    assert owner.find(0, "WORLD", 1) == old


def test_hundreds_of_members_fit(boards: list[Board]) -> None:
    _, first, *_ = boards
    with standing(first, "WORLD", members=[0] * 500, call="x"):
        assert first.current(0).call == "x"
        assert first.current(0).members == [0] * 32

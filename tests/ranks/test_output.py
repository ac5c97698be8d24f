"""What ranks print arrives whole, tagged, in order, and in the cell it belongs to."""

from __future__ import annotations

import time

import pytest

from labsupport import Ranks
from labsupport.ranks.output import Output


def test_stdout_stderr_and_file_descriptors_appear_tagged(two: Ranks, capsys) -> None:
    two.execute(
        "import os, sys, subprocess\n"
        "print('to stdout'); print('to stderr', file=sys.stderr)\n"
        "os.write(1, b'straight to fd 1\\n'); os.write(2, b'straight to fd 2\\n')\n"
        "subprocess.run(['echo', 'from a child'])"
    )
    captured = capsys.readouterr()
    for rank in (0, 1):
        for text in ("to stdout", "straight to fd 1", "straight to fd 2", "from a child"):
            assert f"[{rank}] {text}" in captured.out.splitlines()
        assert f"[{rank}] to stderr" in captured.err.splitlines()


def test_output_streams_while_the_cell_runs(two: Ranks, capsys, monkeypatch) -> None:
    seen: list[float] = []
    show = Output.show

    def watched(self, *, now: bool = False) -> None:
        show(self, now=now)
        if "early" in capsys.readouterr().out:
            seen.append(time.monotonic())

    monkeypatch.setattr(Output, "show", watched)
    started = time.monotonic()
    two.execute("import time; print('early'); time.sleep(2)")
    assert seen
    assert seen[0] - started < 1.0


def test_lines_stay_whole_and_in_rank_order(two: Ranks, lines) -> None:
    two.execute(
        "import sys\nfor i in range(200):\n    sys.stdout.write(f'line {i} ')\n    print('end')"
    )
    shown = lines()
    for rank in (0, 1):
        own = [line for line in shown if line.startswith(f"[{rank}]")]
        assert own == [f"[{rank}] line {i} end" for i in range(200)]
    two.execute("dist.barrier(); print('together')")
    assert lines() == ["[0] together", "[1] together"]


def test_the_last_expression_and_missing_line_ends(two: Ranks, lines) -> None:
    two.execute("print('no end', end='')\nrank * 10")
    assert lines() == ["[0] no end", "[0] 0", "[1] no end", "[1] 10"]


def test_late_output_is_shown_with_a_note(two: Ranks, lines) -> None:
    two.execute(
        "import threading, time\n"
        "def late():\n    time.sleep(0.7); print('late')\n"
        "if rank == 1: threading.Thread(target=late).start()"
    )
    assert lines() == []
    time.sleep(1.2)
    two.execute("print('now')")
    assert lines() == ["[1] (from an earlier cell) late", "[0] now", "[1] now"]


@pytest.mark.parametrize("module", ["tqdm", "tqdm.auto"])
def test_a_progress_bar_on_rank_0(two: Ranks, capsys, module: str) -> None:
    two.execute(
        f"from {module} import tqdm\nimport time\n"
        "if rank == 0:\n    for _ in tqdm(range(5), desc='steps'): time.sleep(0.1)"
    )
    err = capsys.readouterr().err
    assert "\r[0] steps" in err
    assert err.rstrip("\n").rpartition("\r")[2].startswith("[0] steps: 100%")


def test_a_figure_follows_a_line_with_its_rank(two: Ranks, capsys, monkeypatch) -> None:
    published = []
    monkeypatch.setattr("labsupport.ranks.output._publish", published.append)
    two.execute(
        "import matplotlib.pyplot as plt\nif rank == 1:\n    plt.plot([1, 2]); plt.show()\n"
    )
    assert capsys.readouterr().out.splitlines() == ["[1]"]
    assert [set(m["content"]["data"]) for m in published] == [{"image/png", "text/plain"}]


@pytest.mark.parametrize("pieces", [["a\nb", "c\n"], ["a\n", "b", "", "c", "\n"]])
def test_pieces_become_lines(pieces: list[str], capsys) -> None:
    output = Output()
    for piece in pieces:
        output.add_text(1, "stdout", piece)
    output.add_text(0, "stdout", "first\n")
    output.show(now=True)
    assert capsys.readouterr().out == "[0] first\n[1] a\n[1] bc\n"


def test_a_line_after_an_open_bar_starts_on_its_own(capsys) -> None:
    output = Output()
    output.add_text(0, "stdout", "\r 50%")
    output.add_text(1, "stdout", "hello\n")
    output.show(now=True)
    output.add_text(0, "stdout", "\r100%\n")
    output.show(now=True)
    assert capsys.readouterr().out == "\r[0]  50%\n[1] hello\n[0] 100%\n"

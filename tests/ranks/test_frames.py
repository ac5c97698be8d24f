"""Frames of an error name files so that the same error reads the same on every machine."""

from __future__ import annotations

from traceback import FrameSummary

import pytest
import torch

from labsupport import model
from labsupport.ranks.frames import is_plumbing, readable


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        (model.__file__, "labsupport/model.py"),
        (torch.__file__, "torch/__init__.py"),
        ("/tmp/ipykernel_7/3.py", "cell"),
        ("/home/me/loop.py", "/home/me/loop.py"),
    ],
)
def test_a_file_is_named_from_its_package_on(file: str, shown: str) -> None:
    assert readable(FrameSummary(file, 3, "f", line="x"))[0] == f"  {shown}, line 3, in f"


def test_wrappers_of_torch_are_plumbing() -> None:
    assert is_plumbing("/venv/site-packages/torch/_dynamo/eval_frame.py")
    assert not is_plumbing("/venv/site-packages/torch/nn/functional.py")

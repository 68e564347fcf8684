"""What is told on standard error."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from moeq.progress import Reporter

KERNELS = logging.getLogger("moeq.kernels")


def test_what_the_kernels_tell_is_said_by_the_newest_reporter_and_by_no_quiet_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = KERNELS.handlers, KERNELS.level
    try:
        Reporter()
        Reporter()
        KERNELS.info("compiling [code]")
        assert capsys.readouterr().err == "compiling [code]\n"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "stderr", io.StringIO())
            Reporter()
            sys.stderr.close()
        KERNELS.info("compiling for a program that has closed what it redirected")
        KERNELS.handlers = []
        Reporter(quiet=True)
        KERNELS.info("compiling")
        assert capsys.readouterr().err == ""
    finally:
        KERNELS.handlers, level = before
        KERNELS.setLevel(level)

"""Which of llama.cpp's files one of moeq's is held against; the figures take minutes and llama.cpp."""

from __future__ import annotations

import argparse
from pathlib import Path

import figures
import gguf_quality
from gguf_quality import Made


def made(name: str, bits: float, kl: float) -> Made:
    return Made(name=name, folder=Path(), bits=bits, kl=kl)


def test_it_is_held_against_files_of_about_its_size(tmp_path: Path) -> None:
    results = figures.Figures(argparse.Namespace(quick=False, started=0.0, json=None))
    others = [made("llama.cpp's Q2_K", 2.625, 0.04), made("llama.cpp's IQ2_S", 2.5625, 0.03)]
    others += [made("llama.cpp's Q3_K", 3.4375, 0.01), made("llama.cpp's IQ3_S", 3.4375, 0.02)]
    own = [made("moeq's default, --bits 2.625", 2.6, 0.05), made("moeq's default, --bits 3.4375", 3.375, 0.009)]
    gguf_quality.goals(results, [*others, *own, made("moeq's types by llama.cpp, --bits 3.4375", 3.375, 1.0)])
    found = [(figure.name.partition(", of ")[2], round(figure.value, 3), figure.at_most) for figure in results.figures]
    assert found == [
        ("llama.cpp's Q2_K's (k-quants)", 1.25, 1.0),
        ("llama.cpp's IQ2_S's (all types)", 1.667, 1.0),
        ("llama.cpp's Q3_K's (k-quants)", 0.9, 1.0),
        ("llama.cpp's Q3_K's (all types)", 0.9, 1.0),
    ]
    assert [figure.met for figure in results.figures[:3:2]] == [False, True]

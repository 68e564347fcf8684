"""The drills of `drills.py` but for flipped bits: kills, signals, what a disk and a machine refuse, two at once.

A drill is given a new place, does its harm at a random moment, and ends with the same command run to its end: what it
leaves has to be what an unbroken one leaves. It gives back what was drilled, by row of the table; it raises Lost.
"""

from __future__ import annotations

import math
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from drill_subjects import MADE, Ground, Lost, Subject, differing, directory, refusal, result
from robustness import runs

INTERRUPTED = "interrupted; run the same command to go on"
KILLS_A_DIRECTORY = 4
STORAGE, PLAN, ARTIFACT, MISSING = 8, 11, 7, 13  # exit codes
TRIES = 8  # for a moment before the end: on a busy machine a command takes longer or shorter
SMALLEST_BYTES, MEMORY_BYTES = 1 << 12, 300 << 20
Drill = Callable[[Ground, random.Random, Path], Counter[str]]


def subject_of(ground: Ground, chance: random.Random) -> Subject:
    """One of the commands, longer ones more often."""
    subjects = list(ground.subjects.values())
    return chance.choices(subjects, weights=[math.sqrt(one.seconds) for one in subjects])[0]


# --- kills


def kill(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
    """Some SIGKILLs in one place before its command ends: half at any moment, half in a stage chosen among all."""
    subject, landed = subject_of(ground, chance), Counter[str]()
    for number in range(KILLS_A_DIRECTORY):
        if subject.name.startswith("convert") and (place / MADE).exists():
            break  # killed when it had been made
        running = ground.start(subject, place)
        if number % 2 and subject.stages:
            target = chance.choice(_unfinished(subject, place / MADE))
            died = runs.kill_during(running, target, chance.random() * subject.stages[target])
        else:
            died = runs.kill_after(running, chance.random() * subject.left(place / MADE))
        if died is None:
            break
        landed[f"{subject.name}: {died if subject.stages else 'its only step'}"] += 1
    ground.finish_as_unbroken(subject, place)
    return landed


def _unfinished(subject: Subject, made: Path) -> list[str]:
    stages = [stage for stage in subject.stages if not (made / directory(stage) / "stage.json").is_file()]
    return stages or list(subject.stages)


# --- signals


def _interrupt(number: signal.Signals, code: int) -> Drill:
    def drill(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
        """The signal to all of the command's processes, as a terminal sends it; one word, and nothing half-written."""
        subject = subject_of(ground, chance)
        for attempt in range(TRIES):
            running = ground.start(subject, place, "--quiet")
            time.sleep(0.1 + chance.random() * max(0.1, subject.seconds / (attempt + 1) - 0.1))
            running.signal(number)
            finished = running.wait()
            if finished.code != 0:
                break
            shutil.rmtree(place / "in")
            (place / "in").mkdir()
        if (finished.code, finished.stderr.splitlines()) != (code, [INTERRUPTED]):
            raise Lost(f"exit {finished.code}: {finished.stderr.strip()[-600:]}", subject.words(place))
        if runs.partials(place):
            raise Lost(f"half-written: {runs.partials(place)}", subject.words(place))
        ground.finish_as_unbroken(subject, place)
        return Counter({f"{number.name}": 1})

    return drill


def pause(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
    """SIGSTOP, and SIGCONT a moment later: as if nothing had been."""
    subject = subject_of(ground, chance)
    running = ground.start(subject, place, "--quiet")
    for _ in range(2):
        time.sleep(chance.random() * subject.seconds / 2)
        running.signal(signal.SIGSTOP)
        time.sleep(0.1)
        running.signal(signal.SIGCONT)
    finished = running.wait()
    if (finished.code, finished.stderr) != (0, ""):
        raise Lost(f"exit {finished.code}: {finished.stderr.strip()[-600:]}", subject.words(place))
    ground.check(subject, place)
    return Counter({"SIGSTOP, SIGCONT": 1})


SIGNALS = (_interrupt(signal.SIGTERM, 143), _interrupt(signal.SIGINT, 130), pause)


# --- disk and memory


def fill_disk(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
    """A disk too small for what is written; then it grows."""
    subject = subject_of(ground, chance)
    size = chance.randrange(SMALLEST_BYTES, subject.size)
    (place / "in").rmdir()
    with runs.mounted(place / "in", f"size={size}"):
        finished = ground.run(subject, place, "--quiet")
        if finished.code != 0:  # hard links take no room: what is written may fit
            refusal(finished, {STORAGE}, subject.words(place), "No space left on device")
        _nothing_half_written(place, subject)
        runs.remount(place / "in", "size=1g")
        ground.finish_as_unbroken(subject, place)
    return Counter({"full disk": 1})


def read_only(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
    """A disk that became read-only when the command had been killed; then it is writable again."""
    subject = subject_of(ground, chance)
    (place / "in").rmdir()
    with runs.mounted(place / "in"):
        runs.kill_after(ground.start(subject, place), chance.random() * subject.seconds)
        before = result(place)
        runs.remount(place / "in", "ro")
        finished = ground.run(subject, place, "--quiet")
        there = not subject.stages and (place / MADE).exists()  # convert refuses what is there before it looks closer
        refusal(finished, {STORAGE} | ({2} if there else set()), subject.words(place))
        if result(place) != before:
            raise Lost(f"changed a read-only disk: {differing(result(place), before)}", subject.words(place))
        runs.remount(place / "in", "rw")
        ground.finish_as_unbroken(subject, place)
    return Counter({"read-only disk": 1})


def delete(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
    """The directory goes while the command works in it."""
    subject = subject_of(ground, chance)
    running = ground.start(subject, place, "--quiet")
    time.sleep(chance.random() * subject.seconds)
    running.signal(signal.SIGSTOP)
    shutil.rmtree(place / "in")
    running.signal(signal.SIGCONT)
    finished = running.wait()
    if finished.code != 0:
        refusal(finished, {ARTIFACT, STORAGE, MISSING}, subject.words(place))
    ground.finish_as_unbroken(subject, place)
    return Counter({"deleted directory": 1})


def limit_files(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
    """No file may grow beyond a size (RLIMIT_FSIZE)."""
    subject = subject_of(ground, chance)
    limit = int(SMALLEST_BYTES * (subject.size / SMALLEST_BYTES) ** chance.random())
    finished = ground.run(subject, place, "--quiet", file_bytes=limit)
    if finished.code != 0:
        refusal(finished, {STORAGE}, subject.words(place))
    _nothing_half_written(place, subject)
    ground.finish_as_unbroken(subject, place)
    return Counter({"file-size limit": 1})


def limit_memory(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
    """So much address space and no more (RLIMIT_AS) beyond what is loaded when the command begins.

    Where a thread finds no memory to begin, Python waits for it without end, or the C library ends the process: both
    are told apart. What was finished before stays.
    """
    subject = subject_of(ground, chance)
    limit = int(MEMORY_BYTES * chance.random() ** 2)
    finished = ground.run(subject, place, "--quiet", more_bytes=limit)
    row = "memory limit"
    if finished.code == -signal.SIGKILL:
        row += ", killed where Python waits for a thread"
    elif finished.code == 127 and "thread-local data" in finished.stderr:
        row += ", ended by the C library, which found none for a thread"
    else:
        if finished.code != 0:
            refusal(finished, {PLAN}, subject.words(place), "out of memory")
        _nothing_half_written(place, subject)
    ground.finish_as_unbroken(subject, place)
    return Counter({row: 1})


def _nothing_half_written(place: Path, subject: Subject) -> None:
    if runs.partials(place):
        raise Lost(f"half-written: {runs.partials(place)}", subject.words(place))


MOUNTED = (fill_disk, read_only)
DISK = (*MOUNTED, delete, limit_files, limit_memory)


# --- two at once


def one_directory(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
    """The same run twice in one directory: one is refused, or finds all finished."""
    subject = chance.choice([one for one in ground.subjects.values() if one.stages])
    first = ground.start(subject, place, "--quiet")
    time.sleep(chance.random() * 0.8 * subject.seconds)
    second = ground.run(subject, place, "--quiet")
    for finished in (first.wait(), second):
        if finished.code != 0:
            refusal(finished, {STORAGE}, subject.words(place), "another moeq run is working here")
    ground.finish_as_unbroken(subject, place)
    return Counter({"one directory": 1})


def one_store(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
    """Two runs fill one store; half of the time one of them is killed and goes on."""
    subject, store = ground.subjects["run"], place / "store"
    shared = ("--set", f"store={store}")
    two = place.with_name(f"{place.name}-two")
    (two / "in").mkdir(parents=True)
    first = ground.start(subject, place, *shared)
    time.sleep(chance.random() * 0.3 * subject.seconds)
    second = ground.start(subject, two, *shared)
    if chance.random() < 0.5:
        runs.kill_after(first, chance.random() * subject.seconds)
    else:
        first.wait()
    second.wait()
    kept = f"{MADE}/store/"
    for where in (place, two):
        finished = ground.run(subject, where, *shared, "--quiet")
        if (finished.code, finished.stderr) != (0, ""):
            raise Lost(f"exit {finished.code}: {finished.stderr.strip()}", subject.words(where))
        wanted = {name: digest for name, digest in subject.wanted.items() if not name.startswith(kept)}
        found = {name: digest for name, digest in result(where).items() if not name.startswith("store/")}
        if found != wanted:
            raise Lost(f"other than unbroken: {differing(found, wanted)}", subject.words(where))
    wanted = {name.removeprefix(kept): digest for name, digest in subject.wanted.items() if name.startswith(kept)}
    found = {name: digest for name, digest in result(store).items() if not name.startswith("runs/")}
    if found != wanted:
        raise Lost(f"the store is other than unbroken: {differing(found, wanted)}", subject.words(place))
    shutil.rmtree(two)
    return Counter({"one store": 1})


def one_target(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
    """Two conversions to one directory: one writes it, the other is refused."""
    subject = chance.choice([one for name, one in ground.subjects.items() if name.startswith("convert")])
    first = ground.start(subject, place, "--quiet")
    time.sleep(chance.random() * subject.seconds)
    second = ground.run(subject, place, "--quiet")
    ended = [first.wait(), second]
    refused = [finished for finished in ended if finished.code != 0]
    if len(refused) != 1:
        raise Lost(f"exit codes {[finished.code for finished in ended]}", subject.words(place))
    refusal(refused[0], {2, STORAGE}, subject.words(place), MADE)
    ground.check(subject, place)
    return Counter({"one convert target": 1})


TWICE = (one_directory, one_store, one_target)

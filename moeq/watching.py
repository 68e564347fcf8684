"""moeq watch: how far a run is, from what lies in its directory, while it runs elsewhere; as lines, JSON or a page."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from moeq.artifacts.files import BEGUN, write_text
from moeq.artifacts.run import DIRECTORIES, RECIPE_COPY, STAGES, store_folder
from moeq.artifacts.stage import RECORD, read_record
from moeq.artifacts.status import SECONDS, Status, Step, read_status
from moeq.bounded import CONTROL
from moeq.errors import ArtifactError, MoeqError, missing
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.reporting.frame import document
from moeq.reporting.html import Row as HtmlRow
from moeq.reporting.html import Section, element, table
from moeq.tables import human_bytes, human_seconds

DONE, RUNNING, WAITING, BROKEN_OFF = "done", "running", "waiting", "broken off"
BAR = 20  # characters
REFRESH_SECONDS = 5  # of the page, and of sizes on the disk
WORKERS = 16  # that are shown one by one


@dataclass(frozen=True, kw_only=True)
class Row:
    """A stage: what it is at, how much of it is done, seconds it took or has taken, seconds it takes yet (None: not
    known)."""

    stage: str
    state: str
    counted: tuple[Step, ...] = ()
    seconds: float | None = None
    left: float | None = None


@dataclass(frozen=True, kw_only=True)
class View:
    """A run at one moment. sizes: bytes on the disk by folder; status: what it says of itself, None where it does not
    run."""

    out: Path
    rows: tuple[Row, ...]
    sizes: dict[str, int]
    status: Status | None

    def as_json(self) -> dict[str, Any]:
        running = None if self.status is None else self.status.model_dump(mode="json", exclude={"schema_version"})
        rows = [asdict(row) | {"counted": [step.model_dump(mode="json") for step in row.counted]} for row in self.rows]
        return {"out": str(self.out), "running": running, "stages": rows, "bytes": self.sizes}


def look(out: Path, sizes: dict[str, int] | None = None) -> View:
    """A run as it is now. sizes: those of a moment ago, where they need not be counted again. ArtifactError for what
    is no run."""
    if not out.exists():
        raise missing(out, do="give the directory of a run")
    status = read_status(out)
    recipe, do = out / RECIPE_COPY, "give the directory of a run"
    if status is None and not recipe.is_file():
        raise missing(recipe, do) if recipe.is_symlink() else ArtifactError("this is no run", where=str(out), do=do)
    names = [name for name in STAGES if _is_there(_folder(out, name)) or (status and name in status.stages)]
    rows = tuple(_row(out, name, status) for name in names)
    return View(out=out, rows=rows, sizes=_sizes(out) if sizes is None else sizes, status=status)


def _folder(out: Path, stage: str) -> Path:
    return out / DIRECTORIES.get(stage, stage)


def _is_there(folder: Path) -> bool:
    """Whether a stage has been run, or was begun."""
    return folder.is_dir() or _begun(folder).is_dir()


def _begun(folder: Path) -> Path:
    """Where a stage's files lie until they are whole."""
    return folder.parent / f"{folder.name}{BEGUN}"


def _row(out: Path, name: str, status: Status | None) -> Row:
    folder = _folder(out, name)
    if status is not None and status.stage is not None and status.stage.title == name:
        left = status.counted[0].left if status.counted else None
        seconds = status.said - status.stage.began
        return Row(stage=name, state=RUNNING, counted=status.counted, seconds=seconds, left=left)
    with suppress(ArtifactError):
        record = read_record(folder, name)
        coming = status is not None and name in status.stages and not _behind(name, status)
        return Row(stage=name, state=WAITING if coming else DONE, seconds=record.volatile.get("seconds"))
    begun = _begun(folder).is_dir() or (folder / RECORD).exists()
    return Row(stage=name, state=BROKEN_OFF if begun and status is None else WAITING)


def _behind(name: str, status: Status) -> bool:
    """Whether a running command is past a stage."""
    if status.stage is None or status.stage.title not in status.stages:
        return True
    return status.stages.index(name) < status.stages.index(status.stage.title)


def _sizes(out: Path) -> dict[str, int]:
    """Bytes of a run's folders; of what is being written where it is begun, too."""
    folders = {path.name: path for path in out.iterdir() if path.is_dir()}
    with suppress(MoeqError):  # a recipe that another moeq wrote
        store = store_folder(load_recipe(out / RECIPE_COPY, []), out)
        folders.setdefault("store", store)
    return {name: size for name, path in sorted(folders.items()) if (size := _bytes(path))}


def _bytes(folder: Path) -> int:
    """Bytes of the files below a folder; those that go meanwhile count nothing."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def lines(view: View) -> list[str]:
    """What is to be seen, in lines of rich markup."""
    status = view.status
    if status is None:
        found = [f"{escape(str(view.out))}: nothing runs here"]
    else:
        since = human_seconds(status.said - status.began)
        memory = human_bytes(status.resident_bytes)
        found = [f"{escape(status.model)}, process {status.pid} on {escape(status.host)}, {since}, memory {memory}"]
    for row in view.rows:
        style = {RUNNING: "bold", DONE: "green", BROKEN_OFF: "yellow"}.get(row.state, "dim")
        found.append(f"[{style}]{row.stage:9} {_said(row)}[/]")
        found += [f"  {_progress(step)}" for step in row.counted]
    if status is not None and status.workers:
        found.append(f"{len(status.workers)} workers")
        found += [f"  {escape(name)}" for name in status.workers[:WORKERS]]
        found += [f"  and {len(status.workers) - WORKERS} more"] if len(status.workers) > WORKERS else []
    if view.sizes:
        found.append("on the disk: " + ", ".join(f"{escape(name)} {human_bytes(n)}" for name, n in view.sizes.items()))
    return found


def _said(row: Row) -> str:
    """State and times of a stage."""
    taken = _seconds(row.seconds)
    if row.state == RUNNING:
        return f"{taken}, about {human_seconds(row.left)} left" if row.left is not None else taken
    return f"{row.state} in {taken}" if row.state == DONE and taken else row.state


def _progress(step: Step) -> str:
    full = round(BAR * min(1.0, step.done / step.total)) if step.total else BAR
    return f"{'█' * full}{'░' * (BAR - full)} {step.done}/{step.total} {escape(step.title)}"


def _text(line: str) -> Text:
    """A line of markup; `:train:` in a name is no picture."""
    return Text.from_markup(line, emoji=False)


def page(view: View) -> str:
    """The same as an HTML document that a browser reads again every few seconds while the run goes on."""
    status = view.status
    rows = [
        HtmlRow(cells=(row.stage, _counts(row), _seconds(row.seconds), _seconds(row.left)), kind=row.state)
        for row in view.rows
    ]
    sections = [
        Section("stages", "Stages", [table("Stages of the run.", ["stage", "at", "time", "left"], rows, texts=2)])
    ]
    if status is not None and status.workers:
        names = [(str(number), name) for number, name in enumerate(status.workers, 1)]
        sections.append(Section("workers", "Workers", [table("What each does.", ["worker", "at"], names, texts=2)]))
    sizes = [(name, human_bytes(size)) for name, size in view.sizes.items()]
    sections.append(Section("disk", "On the disk", [table("Folders of the run.", ["folder", "size"], sizes)]))
    lead = [element("p", _text(lines(view)[0]).plain)]
    again = None if status is None else REFRESH_SECONDS
    name = Path(os.path.abspath(view.out)).name  # which `.` has not
    return document(f"{name} · moeq watch", name, lead, sections, refresh=again)


def _counts(row: Row) -> str:
    return ", ".join(f"{step.title} {step.done} of {step.total}" for step in row.counted) or row.state


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else human_seconds(seconds)


def moments(out: Path) -> Iterator[View]:
    """The run again and again, until it runs no more; sizes every few seconds."""
    counted, sizes = 0.0, None
    while True:
        if time.monotonic() - counted > REFRESH_SECONDS:
            counted, sizes = time.monotonic(), None
        view = look(out, sizes)
        sizes = view.sizes
        yield view
        if view.status is None:
            return
        time.sleep(SECONDS)


def watch(out: Path, *, html: Path | None = None, once: bool = False, quiet: bool = False) -> View:
    """Show a run on a terminal's standard error until it ends; once: look once and show nothing. html: a page that is
    written again meanwhile. The last view."""
    console = Reporter(quiet=quiet).console
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for view in moments(out):
            if html is not None:
                write_text(html, page(view))
            if once:
                break
            if not quiet and console.is_terminal:
                live.update(Group(*map(_text, lines(view))), refresh=True)
    return view


def show(view: View) -> None:
    """A view on standard output."""
    for line in lines(view):
        print(CONTROL.sub("?", _text(line).plain))

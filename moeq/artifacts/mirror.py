"""A copy of a run directory in an object store: brought at the start, sent as stages end and replicas are made.

ADDRESS/PATH          every file of the run but what is half-written, under its own name
ADDRESS/mirror.json   names, sizes and SHA-256s of the files that are whole, and who works on them; written last

A file counts once the list names it, and its bytes are checked against the list when they are brought; before a file is
replaced or removed, a list without it is written. So a sender that is killed leaves what was there before, or more.
Whoever works on it says so in the list again and again; one that fell silent is gone.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from rich.markup import escape

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import BEGUN, PARTIAL, canonical_json, digest_of, make_directory, write_atomically
from moeq.artifacts.reading import RelativeName, parse_json
from moeq.artifacts.remote import AT_ONCE, file_system, insist, is_remote, not_allowed
from moeq.artifacts.run import RECIPE_COPY, STORE
from moeq.artifacts.stage import RECORD, FileStamp, Frozen, StageRecord
from moeq.artifacts.status import Count
from moeq.errors import ArtifactError, MissingError, MoeqError, RecipeError, StorageError
from moeq.progress import Reporter

LIST = "mirror.json"
SCHEMA_VERSION = 1
SECONDS = 30.0  # between two looks at the store, and two words, while a stage runs
SILENCES = 3  # of so many seconds, after which who works on it is gone
BOOT = Path("/proc/sys/kernel/random/boot_id")
NUMBERS = "/proc/self/ns/pid"  # the name space of processes' numbers
SHORT = 32  # characters of a digest
LOCAL = ("file", "memory")  # schemes whose folders have to be made


@cache
def here() -> str:
    """What names this machine, from its start on, with the numbers that processes have here; a container has others
    than the next one, though both are called the same."""
    try:
        return digest_of([BOOT.read_text(), os.readlink(NUMBERS)])[:SHORT]
    except OSError:
        return secrets.token_hex(SHORT // 2)  # like nothing else: nobody is seen from here


class Holder(Frozen):
    """A command that works on a mirror. place: where its number means something, see `here`; words: how often it has
    said so."""

    host: Annotated[str, Field(max_length=256)]
    pid: Count
    place: Annotated[str, Field(max_length=SHORT)] = ""
    words: Count = 0

    @property
    def is_gone(self) -> bool | None:
        """Whether its process has ended; None where that cannot be seen from here."""
        if self.place != here():
            return None
        return not Path(f"/proc/{self.pid}").exists() or self.pid == os.getpid()

    @property
    def who(self) -> str:
        return f"a command on {self.host!r} (process {self.pid})"


class MirrorList(Frozen):
    """mirror.json: the files that are whole, by their paths, and who works on them."""

    schema_version: int = SCHEMA_VERSION
    files: dict[RelativeName, FileStamp]
    holder: Holder | None = None


class Mirror:
    """The copy of a run directory; StorageError where the store does not take or give something, ModelError where it
    may not."""

    def __init__(self, url: str, out: Path, reporter: Reporter) -> None:
        self.url, self.out, self._reporter = url.rstrip("/"), out, reporter
        self._system, self._root, scheme = file_system(self.url)
        self._makes_folders = scheme in LOCAL
        self._sending, self._writing = threading.Lock(), threading.RLock()  # files, and the list
        self._own: Holder | None = None
        self.files = self._read_list().files

    def take(self) -> None:
        """Have it say that this process works on it; StorageError where another one does.

        One of another machine that says nothing more for a while is gone.
        """
        there = self._read_list()
        if there.holder is not None and there.holder.is_gone is None:
            self._reporter.say(escape(f"  {self.url}: waiting for a word of {there.holder.who}, which may be gone"))
            time.sleep(SILENCES * SECONDS)
            before, there = there, self._read_list()
            if there.holder == before.holder:
                there = there.model_copy(update={"holder": None})
        if there.holder is not None and not there.holder.is_gone:
            do = "wait until it ends, or give another address"
            raise StorageError(f"{there.holder.who} works on it", where=self.url, do=do)
        self._own = Holder(host=platform.node(), pid=os.getpid(), place=here())
        self._write_list(there.files)

    def tell(self) -> None:
        """Have it say so again, also while files are sent."""
        with self._writing:
            self._check_own()
            self._write_list(self.files)

    def _check_own(self) -> None:
        """StorageError where another command has taken it meanwhile: both began at once, or this one was silent."""
        own, holder = self._own, self._read_list().holder
        if own is not None and holder is not None and (holder.place, holder.pid) != (own.place, own.pid):
            raise StorageError(f"{holder.who} has taken it", where=self.url, do="end one, or give another address")

    def leave(self) -> None:
        """Have it say that nobody works on it."""
        with self._sending, self._writing:
            self._check_own()
            self._own = None
            self._write_list(self.files)

    def fetch(self) -> None:
        """Bring what lies there and not here: folders of stages whole, files of the replica store and those that lie
        beside the recipe one by one. What lies here stays as it is."""
        tops = dict.fromkeys(name.partition("/")[0] for name in self.files if "/" in name)
        folders = [top for top in tops if top != STORE and not (self.out / top).exists()]
        beside = [name for name in self.files if "/" not in name and name != RECIPE_COPY]
        wanted = [name for name in beside if not (self.out / name).exists()]
        wanted += [name for name in self.files if name.partition("/")[0] in folders]
        replicas = [name for name in self.files if name.startswith(f"{STORE}/") and not (self.out / name).exists()]
        if not wanted and not replicas:
            return
        for folder in folders:
            shutil.rmtree(self.out / f"{folder}{PARTIAL}", ignore_errors=True)
        with self._reporter.bar("from the mirror", len(wanted) + len(replicas)) as advance:
            self._all((*wanted, *replicas), lambda name: self._bring(name, folders), advance)
        for folder in folders:
            (self.out / folder).unlink(missing_ok=True)  # a link that leads to nothing
            (self.out / f"{folder}{PARTIAL}").rename(self.out / folder)
        self._reporter.say(f"  {len(wanted) + len(replicas)} files from {escape(self.url)}")

    def record(self, folder: str) -> StageRecord | None:
        """The record of a stage that lies there; None where there is none that can be read."""
        name = f"{folder}/{RECORD}"
        if name not in self.files:
            return None
        try:
            data = self._ask(lambda: self._system.cat_file(self._at(name)), name, "cannot be read")
            return StageRecord.model_validate(parse_json(data.decode()))
        except (MissingError, ValidationError, ValueError):
            return None

    def send(self, *, only_store: bool = False) -> None:
        """Have there what lies here. only_store: what the replica store has more, while stages write other files."""
        with self._sending:
            self._check_own()
            there = {name: stamp for name in self._here(only_store) if (stamp := self._stamp(name)) is not None}
            known = self.files
            gone = set[str]() if only_store else known.keys() - there.keys()
            kept = {
                name: stamp for name, stamp in known.items() if name not in gone and there.get(name, stamp) == stamp
            }
            if len(kept) < len(known):
                self._write_list(kept)
            fresh = [name for name in there if name not in self.files]
            if not fresh and not gone:
                return
            sent = dict[str, FileStamp]()

            def one(name: str) -> None:
                self._put(name)
                if self._stamp(name) == there[name]:  # else it was replaced meanwhile, and is sent the next time
                    sent[name] = there[name]

            if only_store:
                self._all(fresh, one, lambda: None)
            else:
                with self._reporter.bar("to the mirror", len(fresh)) as advance:
                    self._all(fresh, one, advance)
            self._write_list(self.files | sent)
            for name in gone:
                self._remove(name)

    def _here(self, only_store: bool) -> list[str]:
        """Paths of the files of the run that are whole; of what lies elsewhere, behind a link, only those of stages,
        which a run goes by wherever they lie."""
        tops = [self.out / STORE] if only_store else sorted(self.out.iterdir())
        own = [top for top in tops if not top.is_symlink() or (top / RECORD).is_file()]
        paths = [path.relative_to(self.out) for top in own for path in (top, *sorted(top.rglob("*"))) if path.is_file()]
        return [path.as_posix() for path in paths if not any(_is_unfinished(part) for part in path.parts)]

    def _stamp(self, name: str) -> FileStamp | None:
        """Size and digest of a file; None where it has just gone."""
        path = self.out / name
        try:
            return FileStamp(bytes=path.stat().st_size, sha256=digest_of_file(path, cached=True))
        except (OSError, MoeqError):
            return None

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _all(self, names: Iterable[str], work: Callable[[str], None], advance: Callable[[], None]) -> None:
        """Do something for some files, many at once."""
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="moeq-mirror") as pool:
            try:
                for _ in pool.map(work, names):
                    advance()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _bring(self, name: str, folders: list[str]) -> None:
        """Bring a file, of a folder that is fetched whole into its unfinished form."""
        top, _, rest = name.partition("/")
        target = self.out / f"{top}{PARTIAL}" / rest if top in folders else self.out / name
        stamp = self.files[name]

        def write(partial: Path) -> str:
            self._ask(lambda: self._system.get_file(self._at(name), str(partial)), name, "cannot be read")
            digest = digest_of_file(partial)
            if digest != stamp.sha256:
                do = f"remove it and {LIST} there, so that the run is sent anew"
                raise ArtifactError(f"is not what {LIST} says", where=f"{self.url}/{name}", do=do)
            return digest

        write_atomically(target, write)

    def _put(self, name: str) -> None:
        at = self._at(name)
        if self._makes_folders:
            self._system.makedirs(at.rpartition("/")[0], exist_ok=True)
        path = self.out / name
        if path.exists():
            self._ask(lambda: self._system.put_file(str(path), at), name, "cannot be written")

    def _remove(self, name: str) -> None:
        with suppress(MissingError):
            self._ask(lambda: self._system.rm_file(self._at(name)), name, "cannot be removed")

    def _read_list(self) -> MirrorList:
        where = f"{self.url}/{LIST}"
        try:
            data = self._ask(lambda: self._system.cat_file(self._at(LIST)), LIST, "cannot be read")
        except MissingError:
            return MirrorList(files={})
        try:
            return MirrorList.model_validate(parse_json(data.decode()))
        except (ValidationError, ValueError):
            raise ArtifactError("is no list of a run's files", where=where, do="give a folder of its own") from None

    def _write_list(self, files: dict[str, FileStamp]) -> None:
        with self._writing:
            if self._own is not None:
                self._own = self._own.model_copy(update={"words": self._own.words + 1})
            listed = MirrorList(files=dict(sorted(files.items())), holder=self._own)
            data = canonical_json(listed.model_dump(mode="json")).encode()
            self._ask(lambda: self._put_list(data), LIST, "cannot be written")
            self.files = files

    def _put_list(self, data: bytes) -> None:
        """Replace the list at once: others read it meanwhile. Stores do, folders by a rename."""
        at = self._at(LIST)
        if not self._makes_folders:
            self._system.pipe_file(at, data)
            return
        self._system.makedirs(self._root, exist_ok=True)
        self._system.pipe_file(f"{at}{PARTIAL}", data)
        self._system.mv(f"{at}{PARTIAL}", at)

    def _ask(self, work: Callable[[], Any], name: str, what: str) -> Any:
        where = f"{self.url}/{name}"
        return insist(work, where, what, refused=lambda error: not_allowed(where, error))


def _is_unfinished(part: str) -> bool:
    """Whether a part of a path says that it is not finished, or nobody else's business."""
    return part.startswith(".") or part.endswith((PARTIAL, BEGUN))


@contextmanager
def mirrored(
    url: str | None, out: Path, reporter: Reporter, check: Callable[[Mirror], None] = lambda _: None
) -> Iterator[Callable[[], None]]:
    """While the block runs, a run directory's replicas are sent every half a minute, and said who does; yields what
    sends all of it, for the end of a stage. check: raises what speaks against what lies there, before anything is
    brought or sent. Without an address nothing is done. RecipeError for what is no address."""
    if url is None:
        yield lambda: None
        return
    if not is_remote(url):
        raise RecipeError(f"not an address: {url[:200]!r}", where="mirror", do="give one such as s3://BUCKET/FOLDER")
    make_directory(out)
    mirror, done = Mirror(url, out, reporter), threading.Event()
    check(mirror)
    mirror.take()

    def again_and_again(work: Callable[[], None]) -> None:
        while not done.wait(SECONDS):
            with suppress(MoeqError):  # the end of the stage says it
                work()

    works = (mirror.tell, partial(mirror.send, only_store=True))
    threads = [threading.Thread(target=again_and_again, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        mirror.fetch()
        yield mirror.send
    except Exception:
        with suppress(MoeqError):
            mirror.send(only_store=True)
        raise
    finally:
        done.set()
        for thread in threads:
            thread.join()
        with suppress(MoeqError):
            mirror.leave()

"""The hub through its own client: snapshots, listings and single files; every failure with its own remedy.

The client takes the token from HF_TOKEN or from `hf auth login`, goes on where a connection broke off, and keeps every
finished file, so that a second run fetches only what is missing.
"""

from __future__ import annotations

import errno
import logging
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, constants, get_cached_repo_tree, get_token, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import disable_progress_bars

from moeq.errors import MoeqError, StorageError, first_line
from moeq.models import offline
from moeq.tables import human_bytes

Kind = Literal["model", "dataset"]
KEPT = "what is already downloaded is kept"
LOG_IN = "set HF_TOKEN or run `hf auth login`"
UNREACHABLE = {"ConnectError", "ConnectTimeout", "ReadTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol"}
BROKEN = {"RemoteProtocolError", "ReadError", "WriteError", "CloseError"}  # of the HTTP client


def be_quiet() -> None:
    """No progress bars and no warnings from the client."""
    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def bars_on_terminals_only() -> None:
    """The client draws some of its bars into logs, too."""
    if not sys.stderr.isatty():
        disable_progress_bars()


def snapshot(
    name: str, revision: str | None, patterns: Sequence[str], *, kind: Kind = "model", error: type[MoeqError]
) -> Path:
    """Directory of a repository's files that match `patterns`; its last part is the commit.

    What is not in the cache yet is downloaded. Raises `error`.
    """
    bars_on_terminals_only()
    with hub_errors(name, kind, revision, error):
        return Path(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=list(patterns)))


def list_files(name: str, commit: str, *, error: type[MoeqError]) -> list[str]:
    """Paths of all files of a data set at a commit, from the hub or, offline, from the cache. Raises `error`."""
    return sorted(_sizes(name, commit, "dataset", error))


def _sizes(name: str, commit: str, kind: Kind, error: type[MoeqError]) -> dict[str, int]:
    """Bytes of all files of a repository at a commit, by path."""
    with hub_errors(name, kind, commit, error):
        try:
            tree: Iterable[Any] = get_cached_repo_tree(name, repo_type=kind, revision=commit)
        except CachedRepoTreeNotFoundError:
            tree = HfApi().list_repo_tree(name, recursive=True, revision=commit, repo_type=kind)
        return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}


def check_to_come(name: str, snapshot: Path, absent: Sequence[str], *, error: type[MoeqError]) -> None:
    """StorageError where those of a model's files that are not in its snapshot yet do not fit on the disk.

    What an earlier download has of them already is not needed again. Raises `error`, also where the hub may not be
    asked for them: a cache of another client does not say that it is not whole.
    """
    if offline.is_set():
        if any(snapshot.glob("*.bin")):
            return  # all that it has, which is refused when headers are read
        what, do = offline.explain(snapshot.name)
        raise error(what, where=name, do=do)
    sizes = _sizes(name, snapshot.name, "model", error)
    begun = sum(path.stat().st_size for path in (snapshot.parent.parent / "blobs").glob("*.incomplete"))
    needed, free = sum(sizes.get(file, 0) for file in absent) - begun, shutil.disk_usage(snapshot).free
    if needed > free:
        what = f"{human_bytes(needed)} of weights are to be downloaded, {human_bytes(free)} are free there"
        do = f"free some, set HF_HOME to another disk, or name hf://{name}, which reads them as they are needed"
        raise StorageError(what, where=constants.HF_HUB_CACHE, do=do)


def file(name: str, path: str, commit: str, *, kind: Kind, error: type[MoeqError]) -> Path:
    """One file of a repository at a commit, downloaded unless it is in the cache. Raises `error`."""
    bars_on_terminals_only()
    with hub_errors(name, kind, commit, error):
        return Path(hf_hub_download(name, path, revision=commit, repo_type=kind))


@contextmanager
def hub_errors(name: str, kind: Kind, revision: str | None, error: type[MoeqError]) -> Iterator[None]:
    """Turn whatever the client raises into one `error` that names the repository and the remedy."""
    try:
        yield
    except MoeqError:
        raise
    except Exception as problem:  # the client raises its own, its HTTP library's and the operating system's errors
        what, do = explain(problem, name, kind, revision)
        raise error(what, where=name, do=do) from problem


def explain(problem: BaseException, name: str, kind: Kind, revision: str | None) -> tuple[str, str]:
    """What went wrong, and what to do about it."""
    causes = chain(problem)
    without_hub = any(isinstance(error, OfflineModeIsEnabled) for error in causes)
    answer = next((error for error in causes if isinstance(error, HfHubHTTPError)), None)
    if answer is not None and not without_hub:
        return _explain_answer(answer, name, kind, revision)
    names = {parent.__name__ for error in causes for parent in type(error).__mro__}
    reason = first_line(causes[-1])
    if without_hub or constants.is_offline_mode():
        return offline.explain(revision)
    full = any(isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) for error in causes)
    if full or any("ot enough free disk space" in str(error) for error in causes):
        return (
            f"no space left for the download in {constants.HF_HUB_CACHE}",
            "free some, or set HF_HOME to another disk",
        )
    if any(isinstance(error, IncompleteSnapshotError) for error in causes):
        return f"the hub cannot be reached and the cache holds only a part ({reason})", f"check the network; {KEPT}"
    if any(isinstance(error, HFValidationError) for error in causes):
        return f"not a hub name ({reason})", "write org/name"
    if names & BROKEN or any("Consistency check failed" in str(error) for error in causes):
        return f"the download broke off ({reason})", f"run the same command again; {KEPT}"
    if names & UNREACHABLE:
        return (
            f"neither here nor to be had from the hub: {constants.ENDPOINT} cannot be reached ({reason})",
            f"check the network and the proxy; {KEPT}",
        )
    if any(isinstance(e, EntryNotFoundError) and not isinstance(e, LocalEntryNotFoundError) for e in causes):
        return f"no such file in it ({reason})", "check the name and the revision"
    return f"not to be had from the hub ({type(problem).__name__}: {reason})", f"run the same command again; {KEPT}"


def _explain_answer(answer: HfHubHTTPError, name: str, kind: Kind, revision: str | None) -> tuple[str, str]:
    """What the hub's own refusal means."""
    status = answer.response.status_code
    unknown = isinstance(answer, RepositoryNotFoundError)  # or not to be seen with this token
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    token = get_token() is not None
    if isinstance(answer, RevisionNotFoundError):
        return f"no revision {revision!r} on the hub", f"give a branch, tag or commit of {page}"
    if isinstance(answer, DisabledRepoError):
        return "disabled on the hub by its owner or by the hub", f"see {page}, or use a local copy"
    if isinstance(answer, GatedRepoError) or (status == 403 and not unknown):
        given = "the token that is set has no access to it" if token else "no token is set"
        use = "use the token of an account that was granted access: " if token else ""
        return f"gated ({status}): {given}", f"accept the licence at {page}, then {use}{LOG_IN}"
    if unknown:
        where = " for the token that is set" if token else ", unless it is private or gated"
        do = f"check the name; if it is private or gated, accept its licence at {page} and {LOG_IN}"
        return f"neither here nor on the hub{where} ({status})", f"{do} with its token" if token else do
    if status == 401:
        return "the hub does not know the token (401)", f"{LOG_IN} with a valid one"
    if isinstance(answer, EntryNotFoundError):
        return f"no such file in it ({first_line(answer)})", "check the name and the revision"
    if status == 429:
        return (
            "the hub asks to wait (429: too many requests)",
            f"wait some minutes; with a token ({LOG_IN}) more is allowed",
        )
    return f"the hub answers {status} ({first_line(answer)})", f"try again later; {KEPT}"


def chain(problem: BaseException) -> list[BaseException]:
    """The error and what it came from, outermost first."""
    causes: list[BaseException] = []
    error: BaseException | None = problem
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes

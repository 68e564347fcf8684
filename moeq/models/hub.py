"""The hub through its own client: snapshots, listings and single files; every failure with its own remedy.

The client takes the token from HF_TOKEN or from `hf auth login`, goes on where a connection broke off, and keeps every
finished file, so that a second run fetches only what is missing.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, constants, get_token, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
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
from huggingface_hub.utils.tqdm import disable_progress_bars

from moeq.errors import MoeqError
from moeq.models import offline

Kind = Literal["model", "dataset"]
KEPT = "what is already downloaded is kept"
LOG_IN = "set HF_TOKEN or run `hf auth login`"
UNREACHABLE = {"ConnectError", "ConnectTimeout", "ReadTimeout", "PoolTimeout", "ProxyError", "UnsupportedProtocol"}
BROKEN = {"RemoteProtocolError", "ReadError", "WriteError", "CloseError"}  # of the HTTP client


def be_quiet() -> None:
    """No progress bars and no warnings from the client."""
    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _bars_on_terminals_only() -> None:
    """The client draws some of its bars into logs, too."""
    if not sys.stderr.isatty():
        disable_progress_bars()


def snapshot(
    name: str, revision: str | None, patterns: Sequence[str], *, kind: Kind = "model", error: type[MoeqError]
) -> Path:
    """Directory of a repository's files that match `patterns`; its last part is the commit.

    What is not in the cache yet is downloaded. Raises `error`.
    """
    _bars_on_terminals_only()
    with hub_errors(name, kind, revision, error):
        found = snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=list(patterns))
    return Path(found)


def list_files(name: str, commit: str, *, kind: Kind, error: type[MoeqError]) -> list[str]:
    """Paths of all files of a repository at a commit, from the hub or, offline, from the cache. Raises `error`."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    with hub_errors(name, kind, commit, error):
        try:
            return sorted(entry.path for entry in get_cached_repo_tree(name, repo_type=kind, revision=commit))
        except CachedRepoTreeNotFoundError:
            return sorted(HfApi().list_repo_files(name, revision=commit, repo_type=kind))


def file(name: str, path: str, commit: str, *, kind: Kind, error: type[MoeqError]) -> Path:
    """One file of a repository at a commit, downloaded unless it is in the cache. Raises `error`."""
    _bars_on_terminals_only()
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
    chain = _chain(problem)
    answered = next((one for one in chain if isinstance(one, HfHubHTTPError)), None)
    if answered is not None and not any(isinstance(one, OfflineModeIsEnabled) for one in chain):
        return _explain_answer(answered, name, kind, revision)
    names = {parent.__name__ for one in chain for parent in type(one).__mro__}
    reason = _reason(chain[-1])
    if any(isinstance(one, OfflineModeIsEnabled) for one in chain) or constants.is_offline_mode():
        return offline.explain(revision)
    full = next((one for one in chain if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT)), None)
    if full is not None or any("ot enough free disk space" in str(one) for one in chain):
        return (
            f"no space left for the download in {constants.HF_HUB_CACHE}",
            "free some, or set HF_HOME to another disk",
        )
    if any(isinstance(one, IncompleteSnapshotError) for one in chain):
        return f"the hub cannot be reached and the cache holds only a part ({reason})", f"check the network; {KEPT}"
    if any(isinstance(one, HFValidationError) for one in chain):
        return f"not a hub name ({reason})", "write org/name"
    if names & BROKEN or any("Consistency check failed" in str(one) for one in chain):
        return f"the download broke off ({reason})", f"run the same command again; {KEPT}"
    if names & UNREACHABLE:
        return (
            f"neither here nor to be had from the hub: {constants.ENDPOINT} cannot be reached ({reason})",
            f"check the network and the proxy; {KEPT}",
        )
    if any(isinstance(one, EntryNotFoundError) and not isinstance(one, LocalEntryNotFoundError) for one in chain):
        return f"no such file in it ({reason})", "check the name and the revision"
    return f"not to be had from the hub ({type(problem).__name__}: {reason})", f"run the same command again; {KEPT}"


def _explain_answer(answer: HfHubHTTPError, name: str, kind: Kind, revision: str | None) -> tuple[str, str]:
    """What the hub's own refusal means."""
    status = answer.response.status_code
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name}"
    token = get_token() is not None
    if isinstance(answer, RevisionNotFoundError):
        return f"no revision {revision!r} on the hub", f"give a branch, tag or commit of {page}"
    if isinstance(answer, DisabledRepoError):
        return "disabled on the hub by its owner or by the hub", f"see {page}, or use a local copy"
    if isinstance(answer, GatedRepoError) or (status == 403 and not isinstance(answer, RepositoryNotFoundError)):
        given = "the token that is set has no access to it" if token else "no token is set"
        use = "use the token of an account that was granted access: " if token else ""
        return f"gated ({status}): {given}", f"accept the licence at {page}, then {use}{LOG_IN}"
    if isinstance(answer, RepositoryNotFoundError) and not token:
        return (
            f"neither here nor on the hub, unless it is private or gated ({status})",
            f"check the name; if it is private or gated, accept its licence at {page} and {LOG_IN}",
        )
    if status == 401 and not isinstance(answer, RepositoryNotFoundError):
        return "the hub does not know the token (401)", f"{LOG_IN} with a valid one"
    if isinstance(answer, RepositoryNotFoundError):
        return (
            f"neither here nor on the hub for the token that is set ({status})",
            f"check the name; if it is private or gated, accept its licence at {page} and {LOG_IN} with its token",
        )
    if isinstance(answer, EntryNotFoundError):
        return f"no such file in it ({_reason(answer)})", "check the name and the revision"
    if status == 429:
        return (
            "the hub asks to wait (429: too many requests)",
            f"wait some minutes; with a token ({LOG_IN}) more is allowed",
        )
    return f"the hub answers {status} ({_reason(answer)})", f"try again later; {KEPT}"


def _chain(problem: BaseException) -> list[BaseException]:
    """The error and what it came from, outermost first."""
    found: list[BaseException] = []
    one: BaseException | None = problem
    while one is not None and one not in found:
        found.append(one)
        one = one.__cause__ or one.__context__
    return found


def _reason(problem: BaseException) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__

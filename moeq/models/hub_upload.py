"""Uploads to the hub through its own client: whose token, onto which branch, then one commit that shows all files.

Large files go first and outside of any commit, so that nobody loads half a checkpoint and an upload that broke off goes
on with what the hub does not hold yet: whole files through Git LFS, pieces of them through Xet where hf_xet is there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from moeq.errors import MoeqError, PushError, first_line
from moeq.models.hub import BROKEN, LOG_IN, UNREACHABLE, chain

DEFAULT_BRANCH = "main"
CORRECT = "save it as UTF-8 text and correct the lines between its first two ---"
AGAIN = "run the same command again: what the hub already holds is not sent again"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A branch of a repository on the hub. head: its last commit, None for a branch that is not there yet.

    files: {path: SHA-256}, None for a file that the hub keeps in git itself.
    """

    private: bool
    head: str | None
    files: Mapping[str, str | None]


def check_token() -> None:
    """PushError where no token is set."""
    if get_token() is None:
        raise PushError("no token is set", where="the hub", do=f"{LOG_IN} with one that may write")


def account() -> str:
    """Name of the account whose token is set; PushError for one that the hub does not know or that may only read."""
    with push_errors(constants.ENDPOINT):
        told = HfApi().whoami()
    if told.get("auth", {}).get("accessToken", {}).get("role") == "read":
        do = f"make one that may write at {constants.ENDPOINT}/settings/tokens"
        raise PushError("the token that is set may only read", where=constants.ENDPOINT, do=do)
    return str(told["name"])


def check_card(text: str) -> None:
    """PushError for a card whose front matter the hub would refuse."""
    with push_errors("README.md"):
        try:
            ModelCard(text).validate()
        except ValueError as error:
            what = f"the hub refuses the card's front matter ({' '.join(str(error).split())})"
            raise PushError(what, where="README.md", do=CORRECT) from error


def look(name: str, branch: str) -> Place | None:
    """A branch as it is now, None where there is no such repository (or it is not to be seen with this token)."""
    api = HfApi()
    with push_errors(name):
        try:
            private = bool(api.model_info(name).private)
            head = api.model_info(name, revision=branch).sha
            tree = list(api.list_repo_tree(name, recursive=True, revision=branch))
        except RevisionNotFoundError:
            return Place(private=private, head=None, files={})
        except RepositoryNotFoundError:
            return None
    files = [entry for entry in tree if isinstance(entry, RepoFile)]
    return Place(private=private, head=head, files={file.path: file.lfs.sha256 if file.lfs else None for file in files})


def create(name: str, branch: str, *, private: bool) -> None:
    """Make the repository and its branch where they are not there; private: seen by its owners only."""
    api = HfApi()
    with push_errors(name):
        api.create_repo(name, private=private or None, exist_ok=True)
        if branch != DEFAULT_BRANCH:
            api.create_branch(name, branch=branch, exist_ok=True)


def send(
    name: str,
    branch: str,
    files: Mapping[str, Path | bytes],
    *,
    removed: Sequence[str],
    parent: str | None,
    message: str,
    check: Callable[[Mapping[str, str]], None],
) -> tuple[str, list[str]]:
    """Upload files and show them with one commit, which also removes files; returns the commit and warnings.

    check: called between the two with {path: SHA-256 of what was sent}; what it raises leaves the branch as it was.
    parent: the commit that the branch must still be at.
    """
    api = HfApi()
    additions = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=content) for path, content in files.items()]
    with push_errors(name):
        api.preupload_lfs_files(name, additions, revision=branch, free_memory=False)
        check({addition.path_in_repo: addition.upload_info.sha256.hex() for addition in additions})
        removals = [CommitOperationDelete(path_in_repo=path, is_folder=False) for path in removed]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            done = api.create_commit(
                name, [*additions, *removals], commit_message=message, revision=branch, parent_commit=parent
            )
    return str(done.oid), [" ".join(str(warning.message).split()) for warning in caught]


@contextmanager
def push_errors(where: str) -> Iterator[None]:
    """Turn whatever the client raises into one PushError with its remedy."""
    try:
        yield
    except MoeqError:
        raise
    except Exception as problem:  # the client raises its own, its HTTP library's and the operating system's errors
        what, do = explain(problem)
        raise PushError(what, where=where, do=do) from problem


def explain(problem: BaseException) -> tuple[str, str]:
    """What went wrong with an upload, and what to do about it."""
    causes = chain(problem)
    answer = next((error for error in causes if isinstance(error, HfHubHTTPError)), None)
    if answer is not None:
        return _explain_answer(answer)
    names = {parent.__name__ for error in causes for parent in type(error).__mro__}
    reason = first_line(causes[-1])
    if names & UNREACHABLE:
        return f"{constants.ENDPOINT} cannot be reached ({reason})", f"check the network and the proxy, then {AGAIN}"
    if names & BROKEN:
        return f"the upload broke off ({reason})", AGAIN
    return f"not uploaded ({type(problem).__name__}: {first_line(problem)})", AGAIN


def _explain_answer(answer: HfHubHTTPError) -> tuple[str, str]:
    """What the hub's own refusal means."""
    status = answer.response.status_code
    if status == 401 and not isinstance(answer, RepositoryNotFoundError):
        return "the hub does not know the token (401)", f"{LOG_IN} with a valid one"
    if status == 403:
        return "the token that is set may not write there (403)", f"{LOG_IN} with one of an account that may"
    if status in (401, 404):
        return f"no such repository for the token that is set ({status})", "check the name and the token's account"
    if status in (409, 412):
        return f"somebody else wrote to it meanwhile ({status})", f"look at what came, then {AGAIN}"
    if status == 429:
        return "the hub asks to wait (429: too many requests)", f"wait some minutes, then {AGAIN}"
    return f"the hub answers {status} ({first_line(answer)})", f"later, {AGAIN}"

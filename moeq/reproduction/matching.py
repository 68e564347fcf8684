"""What a checkpoint is made again of: its statement, and the model and the texts, known by their digests.

A statement comes with the checkpoint, from anybody. Its recipe is validated as a recipe file is; no path in it is
followed, and nothing in it makes code run: model and texts are those that the user names, each with the bytes that the
statement has of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moeq.artifacts.digests import digest_of_file, digests_of_files
from moeq.artifacts.provenance import MODEL, NAME, RUN, TEXT, Digests, Statement, check_listed, read_provenance
from moeq.artifacts.reading import inside
from moeq.artifacts.sums import NAME as SUMS
from moeq.bounded import shortened, shown
from moeq.errors import ArtifactError, CorpusError, ModelError, RecipeError, missing
from moeq.folders import expanded
from moeq.models.source import ModelSource, open_source
from moeq.preflight import check_checkpoint
from moeq.progress import Reporter
from moeq.recipe import BUNDLED, DIGITS, HUB, Recipe, each_source, load_recipe
from moeq.runtimes import NATIVE

OLDER = "export it again with this moeq, which writes one"
LONGEST = 200  # characters of a name in a message
APART = {  # of a recipe: places, and what shapes no byte
    "model", "revision", "store", "workers", "engine", "mirror", "eval", "estimate", "gates",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A checkpoint's statement with what it names, found here.

    digest: of the statement's file; model: where it lies; texts: of every source of the recipe the file here, a
    dataset's name with its commit, or None for what moeq brings along.
    """

    checkpoint: Path
    statement: Statement
    digest: str
    recipe: Recipe
    model: Path
    texts: tuple[Path | str | None, ...]
    trust_remote_code: bool


def match(
    checkpoint: Path, model: str, texts: Sequence[str], trust_remote_code: bool, reporter: Reporter | None = None
) -> Inputs:
    """What a checkpoint is made again of; nothing is written, and nothing heavy imported.

    Raises ArtifactError for a checkpoint that is not whole or has no statement, RecipeError for a recipe that this moeq
    does not take or must not follow, ModelError and CorpusError for files that are not those of the statement.
    """
    check_checkpoint(checkpoint)
    statement, digest = _statement(checkpoint, reporter)
    recipe = _recipe(statement, checkpoint / NAME, trust_remote_code)
    found = _texts(statement, recipe, texts, checkpoint / NAME)
    source = _model(statement, model, trust_remote_code, reporter)
    return Inputs(
        checkpoint=checkpoint.resolve(),
        statement=statement,
        digest=digest,
        recipe=recipe,
        model=source.path.resolve(),
        texts=found,
        trust_remote_code=trust_remote_code,
    )


def _statement(checkpoint: Path, reporter: Reporter | None) -> tuple[Statement, str]:
    """The statement of a checkpoint that is whole, and the digest of its file."""
    if read_provenance(checkpoint) is None:  # before every file is read
        raise ArtifactError(f"no {NAME}, which says what it was made of", where=str(checkpoint), do=OLDER)
    sums, statement = check_listed(checkpoint, reporter)
    if sums is None or statement is None:
        what = f"no {SUMS}: whether it is whole cannot be told"
        raise ArtifactError(what, where=str(checkpoint), do="download it again")
    return statement, sums.files[NAME]


def _recipe(statement: Statement, path: Path, trust_remote_code: bool) -> Recipe:
    """The recipe that a statement has; RecipeError for one that this moeq does not take, or must not follow."""
    definition, asked = statement.predicate.definition, statement.parameters
    if definition.build_type != RUN or asked.recipe is None:
        made_of = "another checkpoint" if asked.checkpoint is None else shortened(asked.checkpoint.name)
        do = f"reproduce that one, and convert it with --to {shortened(asked.runtime)}"
        raise RecipeError(f"made by `moeq convert` from {made_of}, not by a run", where=str(path), do=do)
    data = {key: value for key, value in asked.recipe.items() if key not in APART}
    evaluation = asked.recipe.get("eval")  # where a size was asked for: names in the card, which it counts
    data["eval"] = {"compare": evaluation.get("compare", []) if isinstance(evaluation, dict) else []}
    try:
        recipe = load_recipe(data)
        for section in (recipe.assign, *recipe.eval.compare):
            _check_preset(section.hardware)
    except RecursionError:
        raise RecipeError("nested too deeply", where=f"{path}: recipe", do="download the checkpoint again") from None
    except RecipeError as error:
        where = f"{path}: {error.where or 'recipe'}"
        raise RecipeError(error.what, where=where, do="reproduce it with the moeq that made it") from None
    if asked.runtime not in (NATIVE, *recipe.export.formats):
        what = f"written for {shortened(asked.runtime)}, which its recipe does not name"
        raise ArtifactError(what, where=str(path), do="download the checkpoint again")
    if recipe.trust_remote_code and not trust_remote_code:
        what = "its recipe runs Python code that the model brings along"
        raise RecipeError(what, where=str(path), do="read that code, and allow it by --trust-remote-code")
    return recipe


def _check_preset(name: str | None) -> None:
    """RecipeError for hardware that does not come with moeq: no statement may have it read a file."""
    from moeq.estimator.hardware import known_hardware

    if name is not None and name not in known_hardware():
        what = f"hardware is {shown(name)}, a file that moeq does not bring along"
        raise RecipeError(what, where="recipe")


def _model(statement: Statement, name: str, trust_remote_code: bool, reporter: Reporter | None) -> ModelSource:
    """The model that is named here; ModelError for the first file that is not the statement's."""
    named = statement.parameters.model
    assert named is not None, "of a run"
    source = open_source(name, named.revision, trust_remote_code=trust_remote_code)
    called = shortened(named.name if named.revision is None else f"{named.name} at {named.revision}", LONGEST)
    do, wanted = f"give the model that it was made of: {called}", statement.sha256_of(MODEL)
    found = source.named_files()
    try:
        paths = {file: inside(source.path, file) if file not in found else found[file] for file in wanted}
    except ValueError as error:
        raise ModelError(str(error), where=str(source.path), do=do) from None
    for file, path in paths.items():
        if not path.is_file():
            raise ModelError(f"missing: {NAME} has it with SHA-256 {wanted[file]}", where=str(path), do=do)
    digests = digests_of_files(paths.values(), cached=True, reporter=reporter, title="hashing the model")
    for file, path in paths.items():
        if digests[path] != wanted[file]:
            raise ModelError(f"{other(digests[path], wanted[file])}", where=str(path), do=do)
    for file, path in found.items():
        if file not in wanted:
            what = f"SHA-256 {digest_of_file(path, cached=True)}, and {NAME} names no such file of the model"
            raise ModelError(what, where=str(path), do=do)
    return source


def other(found: str, wanted: str) -> str:
    """What is said of a file whose digest is another one."""
    return f"its SHA-256 is {found}, in {NAME} it is {wanted}"


def _texts(statement: Statement, recipe: Recipe, given: Sequence[str], where: Path) -> tuple[Path | str | None, ...]:
    """Of every source of the recipe the file here that has its digest, whatever it is called.

    A set of images that is no single file is known by its name, and compared when it is read; a dataset of the hub by
    its name with its commit. Raises CorpusError for what is none of them, and for one that is missing; MissingError.
    """
    sources = _sources(statement, recipe, where)
    hub = [name for name, _ in sources if name.startswith(HUB)]
    for name in hub:
        if name not in given:
            what = "missing: it was calibrated on this dataset"
            raise CorpusError(what, where=shown(name), do="allow it by --text and this name")
    named = {name: expanded(name).absolute() for name in given if name not in (BUNDLED, DIGITS, *hub)}
    for name, path in named.items():
        if not path.exists():
            raise missing(name, "give what it was calibrated on")
    paths = [*named.values()]
    wanted = [(name, digests) for name, digests in sources if name not in (BUNDLED, DIGITS, *hub)]
    sets = {name: path for name, digests in wanted for path in paths if not digests.sha256 and path.name == name}
    rest = [path for path in paths if path not in sets.values()]
    found = {path: digest_of_file(path, cached=True) for path in rest if path.is_file()}
    _check_all([(name, digests.sha256) for name, digests in wanted], found, set(rest) - set(found), sets)
    by_digest = {digest: path for path, digest in found.items()}
    matched: list[Path | str | None] = []
    for name, digests in sources:
        if name in (BUNDLED, DIGITS):
            matched.append(None)
        elif name in hub:
            matched.append(name)
        else:
            matched.append(by_digest[digests.sha256] if digests.sha256 else sets[name])
    return tuple(matched)


def _sources(statement: Statement, recipe: Recipe, where: Path) -> list[tuple[str, Digests]]:
    """(name, digests) of what the recipe's sources name, in their order; datasets of the hub with their commit.

    ArtifactError where the statement does not say what one of them was.
    """
    found, known = [], statement.dependencies(TEXT)
    for at, source in enumerate(each_source(recipe.corpus.source)):
        name, digests = known[at] if at < len(known) else ("", Digests())
        hub = source.path.startswith(HUB)
        its = digests.git_commit if hub else digests.sha256 or digests.own
        if its is None or (not name.startswith(HUB) if hub else name not in _names(source.path)):
            what = f"it has no digest of {shown(source.path)}, which its recipe names"
            raise ArtifactError(what, where=str(where), do="download the checkpoint again")
        found.append((name, digests))
    return found


def _names(path: str) -> tuple[str, ...]:
    """What a text that is no dataset may be called: its file; images that moeq brings along have two names."""
    return (BUNDLED, DIGITS) if path in (BUNDLED, DIGITS) else (PurePosixPath(path).name,)


def _check_all(
    wanted: Sequence[tuple[str, str | None]],
    found: Mapping[Path, str],
    strange: Collection[Path],
    sets: Mapping[str, Path],
) -> None:
    """CorpusError where what is given is not all that is wanted, and nothing else."""
    absent = [(name, digest) for name, digest in wanted if digest is not None and digest not in found.values()]
    known = {digest for _, digest in wanted}
    for path in (path for path, digest in found.items() if digest not in known):
        alike = [one for one in absent if one[0] == path.name] or absent
        if alike:
            what = f"{other(found[path], str(alike[0][1]))} ({shown(alike[0][0])})"
            raise CorpusError(what, where=str(path), do="give the text that it was calibrated on")
        what = f"SHA-256 {found[path]}, and {NAME} has no text of that"
        raise CorpusError(what, where=str(path), do="leave it out")
    for path in strange:
        raise CorpusError(f"{NAME} has no text of that name", where=str(path), do="leave it out")
    for name, digest in [*absent, *((name, None) for name, digest in wanted if digest is None and name not in sets)]:
        what = "missing: it was calibrated on it" + ("" if digest is None else f", SHA-256 {digest}")
        raise CorpusError(what, where=shown(name), do="give it by --text")

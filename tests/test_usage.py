"""Manners of every command, whichever there are: help, completion, mistakes in the command line, JSON."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.main import get_command

from moeq import cli
from moeq.cli import ending
from moeq.cli.usage import asks_json, wrapped
from moeq.errors import MissingError, ModelError, RecipeError, missing

GROUP: Any = get_command(cli.app)
NAMES = sorted(name for name, command in GROUP.commands.items() if not command.hidden)
NO_MODEL_RUNS = {  # commands without --device; reproduce takes what the provenance says
    "convert", "estimate", "families", "gc", "init", "inspect", "push", "recipe", "report", "reproduce",
    "sign", "verify", "watch",
}  # fmt: skip
WORDS_OF_A_MESSAGE = ("Usage:", "Try '", "Error:", "Invalid value")


def ended(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line."""
    monkeypatch.setattr(sys, "argv", ["moeq", *words])
    monkeypatch.setattr(ending, "quiet_libraries", lambda: None)  # for good, which is no matter to a command
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, out, err


Lines = Callable[[str, int, str], str]


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lines:
    """The help of a command, "" for that of all, in a window of so many columns."""

    def shown(name: str, columns: int, flag: str) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        code, out, err = ended([*([name] if name else []), flag], monkeypatch, capsys)
        assert (code, err) == (0, "")
        return out

    return shown


@pytest.mark.parametrize("name", ["", *NAMES])
@pytest.mark.parametrize("columns", [80, 60])
def test_help_is_whole(name: str, columns: int, helped: Lines) -> None:
    """Every option and every word of help is there, unbroken; at 60 columns, but for lists of values."""
    command, text = GROUP.commands[name] if name else GROUP, helped(name, columns, "--help")
    assert max(map(len, text.splitlines())) <= columns
    assert not [
        line for line in text.splitlines() if line.endswith("...") and not line.endswith((">...", "]...", "}..."))
    ]
    words = {word.rstrip(",") for word in text.split()}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            assert {option for option in parameter.opts if option.startswith("-")} <= words
            assert squeezed(parameter.help, columns) in squeezed(text, columns), parameter.name
    for other in [] if name else NAMES:
        assert squeezed(GROUP.commands[other].help.split("\n\n")[0], columns) in squeezed(text, columns)


def squeezed(text: str, columns: int) -> str:
    """Words apart by one space; in a narrow window, where long lists of values are broken behind commas, by none."""
    return ("" if columns < 80 else " ").join(text.split())


@pytest.mark.parametrize("name", ["", *NAMES])
def test_short_help_is_help(name: str, helped: Lines) -> None:
    assert helped(name, 80, "-h") == helped(name, 80, "--help")


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_the_options_of_all(name: str) -> None:
    options = {option for parameter in GROUP.commands[name].params for option in parameter.opts}
    assert {"--json", "--quiet"} <= options
    assert ("--device" in options) == (name not in NO_MODEL_RUNS)


def mistakes() -> Iterator[tuple[list[str], str]]:
    """Command lines with one mistake each, and what is said of it."""
    yield ["asign"], "moeq: unknown command 'asign'; did you mean 'assign'?"
    yield ["--jsan"], "moeq: unknown option '--jsan'; give --json behind the command that it belongs to"
    yield ["init", "a", ""], "moeq: init: unexpected argument ''; see moeq init -h"
    yield ["zzzz"], "moeq: unknown command 'zzzz'; known are run,"
    for name in NAMES:
        yield [name, "--jsn"], f"moeq: {name}: unknown option '--jsn'; did you mean '--json'?"
        yield [name, "--json=1"], f"moeq: {name}: --json takes no value; see moeq {name} -h"
        for parameter in GROUP.commands[name].params:
            kind = parameter.type_descriptor
            option = parameter.opts[0]
            if parameter.param_type_name == "argument":
                if parameter.required:
                    yield [name], f"moeq: {name}: "
                if parameter is GROUP.commands[name].params[0]:
                    shown = parameter.metavar or parameter.name.upper()
                    yield [name, ""], f"moeq: {name}: {shown} is empty; give a value"
                continue
            if kind.choices:
                wrong = f"{kind.choices[0]}x"
                yield [name, option, wrong], f"moeq: {name}: {option} {wrong!r} is no choice; did you mean '"
            if kind.annotation in (int, float):
                number = "a whole number" if kind.annotation is int else "a number"
                yield [name, option, "x"], f"moeq: {name}: {option} 'x'; give {number}"
                if kind.parameter_info.min is not None:
                    least = kind.parameter_info.min
                    text = f"moeq: {name}: {option} '{least - 1:g}'; give {number} from {least:g}"
                    yield [name, f"{option}={least - 1:g}"], text
            if kind.annotation is not bool:
                yield [name, option], f"moeq: {name}: {option} needs a value; see moeq {name} -h"
                empty = f"moeq: {name}: {option} is empty; give a value"
                yield from (([name, *words], empty) for words in ([f"{option}="], [option, ""]))


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also under --json, where an object with the same line stands on standard output."""
    every = list(mistakes())
    assert len(every) > 150
    for words, said in every:
        code, out, err = ended(words, monkeypatch, capsys)
        assert (code, out) == (RecipeError.exit_code, ""), words
        assert err.startswith(said), f"{words}: {err}"
        assert err.count("\n") == 1, err
        assert not any(word in err for word in WORDS_OF_A_MESSAGE), err
        assert "; " in err


@pytest.mark.parametrize(
    "words", [["asign", "--json"], ["--json", "assign"], ["assign", "--jsn", "--json"], ["convert", "--json", "x"]]
)
def test_mistakes_in_json(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ended(words, monkeypatch, capsys)
    found = json.loads(out)
    assert (found["schema_version"], found["error"], found["exit_code"], code) == (1, "RecipeError", 2, 2)
    assert err == f"moeq: {found['message']}\n"
    assert found["what"] in found["message"]
    assert found["do"] in found["message"]


def test_a_prompt_whose_bytes_are_no_text_is_refused(
    tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a UTF-8 prompt is in an ASCII locale: it ended as a bug in moeq."""
    code, _, err = ended(["generate", str(tiny_mixtral), "na\udcc3\udcafve"], monkeypatch, capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("moeq: PROMPT: no UTF-8 text; give text")


def test_json_is_asked_for_before_the_end_of_options() -> None:
    assert asks_json(["--json", "x"])
    assert asks_json(["x", "y", "--json"])
    assert not asks_json(["generate", "x", "--", "--json"])


def test_no_words_at_all_are_answered_with_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ended([], monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert "Commands:" in err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["as"], {"assign"}),
        (["assign", "--fr"], {"--frontier"}),
        (["assign", "--method", "opt"], {"optimal"}),
        (["assign", "--device", "cu"], {"cuda"}),
        (["run", "--quantizer", "si"], {"signround"}),
        (["run", "--quality", "b"], {"balanced", "best"}),
        (["run", "--preset", "paper-00"], {f"paper-00{number}" for number in range(5)}),
        (["run", "--for", "vllm-c"], {"vllm-cuda"}),
        (["export", "--format", "compressed-tensors-w"], {"compressed-tensors-w8a8"}),
        (["convert", "--to", "na"], {"native"}),
        (["estimate", "--hardware", "paper"], {"paper-ctxmoe"}),
        (["estimate", "--model", "mixtral-8x7"], {"mixtral-8x7b"}),
        (["eval", "--dtype", "b"], {"bfloat16"}),
    ],
)
def test_completion(
    words: list[str], wanted: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of commands, options, choices and names, as bash asks for it."""
    monkeypatch.setenv("_MOEQ_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["moeq", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    code, out, _ = ended([], monkeypatch, capsys)
    assert code == 0
    assert set(out.split()) == wanted


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_shown(shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setattr(typer.main, "get_command", typer.main.get_command.__wrapped__)  # type: ignore[attr-defined]
    code, out, _ = ended(["--show-completion", shell], monkeypatch, capsys)
    assert code == 0
    assert "_MOEQ_COMPLETE" in out


def test_results_have_a_schema_version(capsys: pytest.CaptureFixture[str]) -> None:
    ending.show({"a": 1}, print, json=True)
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "a": 1}
    ending.show({"schema_version": 7, "a": 1}, print, json=True)
    assert json.loads(capsys.readouterr().out)["schema_version"] == 7


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "words",
    [["families", "qwen3"], ["estimate", "--sheet", "paper-004"], ["estimate", "--model", "mixtral-8x7b"],
     ["estimate", "--model", "mixtral-8x7b", "--capacity"]],
)  # fmt: skip
def test_json_is_an_object(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ended([*words, "--json"], monkeypatch, capsys)
    assert code == 0
    assert json.loads(out)["schema_version"] >= 1
    code, out, err = ended([*words, "--quiet"], monkeypatch, capsys)
    assert (code, out, err) == (0, "", "")


def test_a_long_path_is_shortened() -> None:
    error = missing("n" * 5000, "check it")
    assert (type(error), error.exit_code) == (MissingError, 13)
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 67108864 bytes."
        ),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OSError(12, "Cannot allocate memory"),
        ImportError("a.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
    ],
)
def test_memory_that_runs_out_is_no_bug(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(ending, "quiet_libraries", lambda: None)
    with pytest.raises(SystemExit) as ended:
        ending.run(app)
    assert ended.value.code == 11
    assert capsys.readouterr().err.startswith("moeq: out of memory; ")


def test_a_folder_that_has_been_removed_is_no_place_to_start_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There torch ends the process: "Intel oneMKL FATAL ERROR: Cannot load libtorch_cpu.so"."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    monkeypatch.setattr(ending, "quiet_libraries", lambda: None)
    with pytest.raises(SystemExit) as ended:
        ending.run(lambda: None)
    assert ended.value.code == 13
    assert capsys.readouterr().err.startswith("moeq: the folder that this was started in has been removed; ")


@pytest.mark.parametrize("fails", [False, True])
def test_without_a_folder_for_temporary_files_an_error_is_one_line_too(
    fails: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where all of the disk is read-only but the run's directory; the log of a bug has no place there either."""

    def app() -> None:
        if fails:
            raise ValueError("of a bug")
        tempfile.gettempdir()

    monkeypatch.setattr(ending, "quiet_libraries", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(SystemExit) as ended:
        ending.run(app)
    said = "bug in moeq: ValueError: of a bug; " if fails else "TMPDIR: no folder for temporary files can be written; "
    assert ended.value.code == (1 if fails else 8)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"moeq: {said}")


@pytest.mark.parametrize(
    ("behind", "code"), [(MemoryError(), 11), (ValueError("Cannot allocate memory"), 11), (KeyError(), 3)]
)
def test_memory_that_ran_out_behind_an_error_of_moeqs_is_told(
    behind: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def app() -> None:
        try:
            raise behind
        except Exception:
            raise ModelError("transformers cannot load it", where="model", do="download it again") from None

    monkeypatch.setattr(ending, "quiet_libraries", lambda: None)
    with pytest.raises(SystemExit) as ended:
        ending.run(app)
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith("moeq: out of memory; " if code == 11 else "moeq: model: transformers")


@pytest.mark.parametrize(("command", "more"), [("losses", "; run the same command to go on"), ("generate", "")])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_an_interrupt_that_a_library_made_another_error_of(
    number: signal.Signals,
    code: int,
    command: str,
    more: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch says ValueError where it comes while a tensor is made of a file's bytes."""

    def app() -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape of object type 'torch.storage.UntypedStorage'") from None

    monkeypatch.setattr(sys, "argv", ["moeq", command, "RUN"])
    monkeypatch.setattr(ending, "quiet_libraries", lambda: None)
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(SystemExit) as ended:
            ending.run(app)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert ended.value.code == code
    assert capsys.readouterr().err == f"interrupted{more}\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_an_interrupt_that_python_drops_comes_again(number: signal.Signals, code: int) -> None:
    """One that comes while an object is freed, as the locks of modules are by an import."""
    program = (
        "import signal, sys, time\n"
        "from moeq.cli import ending\n"
        f"signal.signal({int(number)}, signal.SIG_DFL)\n"  # a shell ignores SIGINT for what runs in its background
        "class Freed:\n"
        "    def __del__(self):\n"
        f"        signal.raise_signal({int(number)})\n"
        "def app():\n"
        "    Freed()\n"
        "    time.sleep(20)\n"
        "    print('went on')\n"
        "sys.argv = ['moeq', 'eval']\n"
        "ending.run(app)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == "interrupted; run the same command to go on\n"


@pytest.mark.parametrize("when", ["while others leave", "while the interpreter goes"])
@pytest.mark.parametrize(("ending_code", "said"), [(130, "interrupted\n"), (7, "")])
def test_an_interrupt_behind_the_end_changes_nothing(when: str, ending_code: int, said: str) -> None:
    """As impatient people send: a second one comes when the first has been told of, or when all is done."""
    behind = "atexit.register(signal.raise_signal, signal.SIGINT)" if "others" in when else "global held; held = Held()"
    program = (
        "import atexit, signal, sys\n"
        "from moeq.cli import ending\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Held:\n"
        "    def __del__(self, raise_signal=signal.raise_signal, number=signal.SIGINT):\n"
        "        raise_signal(number)\n"
        "def app():\n"
        f"    {behind}\n"
        f"    {'signal.raise_signal(signal.SIGINT)' if ending_code == 130 else f'sys.exit({ending_code})'}\n"
        "sys.argv = ['moeq', 'inspect']\n"
        "ending.run(app)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (ending_code, "", said)


def test_an_interrupt_before_the_command_line_is_there_is_one_line() -> None:
    program = (
        "import signal, sys\n"
        "from moeq import __main__\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'moeq.cli':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "__main__.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_words_are_broken_behind_commas_alone() -> None:
    assert wrapped("a-b-c --set x=1,y=2,z=3 end", 9) == ["a-b-c", "--set", "x=1,y=2,", "z=3 end"]
    assert wrapped("", 9) == []


def test_libraries_are_quiet_but_for_what_matters() -> None:
    """In a fresh process: their warnings and logs are dropped, a missing driver is one line of moeq's."""
    code = (
        "import logging, sys, warnings\n"
        "from moeq.cli import ending\n"
        "def app():\n"
        "    warnings.warn('`torch_dtype` is deprecated', FutureWarning)\n"
        "    logging.getLogger('transformers.modeling').warning('some weights')\n"
        "    logging.getLogger('huggingface_hub').warning('no token')\n"
        "    logging.getLogger('matplotlib').warning('no folder for a cache')\n"
        "    warnings.warn('CUDA initialization: the NVIDIA driver\\n is too old')\n"
        "sys.argv = ['moeq']\n"
        "ending.run(app)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == "moeq: note: CUDA initialization: the NVIDIA driver is too old\n"
    kept = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert "torch_dtype" in kept.stderr


@pytest.mark.parametrize("words", [["recipe", "--schema"], ["families"]], ids=["printed", "a table"])
def test_a_reader_that_closes_the_pipe_ends_a_command_as_a_signal_would(words: list[str]) -> None:
    """As 141, not as the 1 of a bug in moeq."""
    code = f"import sys; from moeq.cli import main; sys.argv = {['moeq', *words]}; main()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        command.stdout.close()
        assert command.stderr is not None
        assert command.stderr.read() == b""
    assert command.returncode == 141


@pytest.mark.cases(1)
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_characters_that_standard_output_has_no_encoding_for_are_escaped(tmp_path: Path, encoding: str) -> None:
    """They ended a command as a bug in moeq, and an error in JSON with a traceback; also bytes of a name that are no
    text."""
    recipe = tmp_path / "\udcff.yaml"
    name = "model: \u65e5\u672c"
    recipe.write_text(name, encoding="utf-8")

    def ran(*words: str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
        done = subprocess.run([sys.executable, "-m", "moeq", *words], env=environment, capture_output=True, check=False)
        return done.returncode, done.stdout.decode(encoding)

    code, shown = ran("recipe", str(recipe))
    assert (code, shown.splitlines()[2]) == (0, name.encode(encoding, "backslashreplace").decode(encoding))
    code, shown = ran("inspect", str(recipe), "--json")
    assert (code, json.loads(shown)["model"]) == (0, name.removeprefix("model: "))
    code, shown = ran("inspect", str(recipe.with_name("none \udcff")), "--json")
    assert (code, json.loads(shown)["where"]) == (13, str(recipe.with_name("none \udcff")))


def test_a_command_goes_on_where_standard_output_is_closed() -> None:
    """Its end was a bug in moeq, of a stream that is not there."""
    command = f"{shlex.quote(sys.executable)} -m moeq families mixtral >&-"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

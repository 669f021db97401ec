"""The options dataclass as a command line: flags, `ASYNCSERVE_*` variables, a YAML file, `--help`.

Takes argv and the environment, gives a validated `ServerConfig`. Every option is a field of that class, and
this file knows none by name: names, types, defaults, help texts and headings are read from `config.py`.
Each source is turned into arguments and goes through the one argparse parser, so that a value is
converted and refused alike wherever it stands. Precedence: command line > environment > file > default.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import logging
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml

import asyncserve
from asyncserve.config import FAULTS_VARIABLE, GROUPS, BatchConfig, ServerConfig
from asyncserve.errors import ConfigError

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "ASYNCSERVE_"
"""`--max-model-len` is `ASYNCSERVE_MAX_MODEL_LEN` in the environment."""

_SWITCHES = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SERVER_USAGE = (
    "asyncserve MODEL [options]\n       asyncserve run-batch MODEL -i IN.jsonl -o OUT.jsonl [options]"
)
_BATCH_USAGE = "asyncserve run-batch MODEL -i IN.jsonl -o OUT.jsonl [options]"
_EPILOG = (
    "Every option can also be set by an environment variable (--max-model-len: ASYNCSERVE_MAX_MODEL_LEN; "
    "several values separated by commas) or by a key of the --config file (max_model_len). The command line "
    "goes before the environment, the environment before the file. Whole numbers may end in k, m, g, t "
    "(powers of 1000; also kB, MB, GB, TB) or K, M, G, T (powers of 1024; KiB, MiB, GiB, TiB too)."
)


Config = TypeVar("Config", bound=ServerConfig)


def read_config(argv: Sequence[str], environ: Mapping[str, str], kind: type[Config]) -> Config:
    """Read the options from all their sources and validate them.

    `--help`, `--version` and `--print-config` print and end the process with status 0.

    Args:
        argv: The command line without the program's name; a leading `serve` is ignored.
        environ: The environment.
        kind: Whose options: the server's, or those of a batch.

    Raises:
        ConfigError: One line: the option, where it stands if not on the command line, and what would do.
    """
    parser = _build_parser(kind)
    on_command_line = _parse(parser, kind, argv[1:] if argv and argv[0] == "serve" else argv)
    in_environment = _parse(
        parser, kind, _environment_arguments(environ, kind), source="in the environment: "
    )
    print_only = on_command_line.pop("print_config", False)
    layers: list[dict[str, Any]] = [in_environment, on_command_line]
    config_file = (in_environment | on_command_line).get("config")
    if config_file is not None:
        source = f"in {config_file}: "
        arguments = _file_arguments(Path(config_file), kind, source)
        layers.insert(0, _parse(parser, kind, arguments, source=source))
    values: dict[str, Any] = {}
    for layer in layers:
        layer.pop("config", None)
        values.update(layer)
    for option in dataclasses.fields(kind):
        if _is_required(option) and option.name not in values:
            flag = option.name.upper() if _is_positional(option) else _flag(option.name)
            raise ConfigError(
                f"{option.name} is missing: {parser.prog} {flag}, "
                f"{ENVIRONMENT_PREFIX}{option.name.upper()}, or {option.name}: in the --config file"
            )
    config = kind(**values)
    config.validate()
    if print_only:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def to_yaml(config: ServerConfig) -> str:
    """Return the options as a file for `--config`; secrets are only counted."""
    lines = []
    for option in dataclasses.fields(config):
        value = getattr(config, option.name)
        if option.name in GROUPS:
            lines.append(f"# {GROUPS[option.name]}\n")
        if not option.repr:
            lines.append(f"# {option.name}: not shown, {len(value)} set\n")
            continue
        # An empty list would not be taken when it is read back.
        plain = (list(value) or None) if isinstance(value, tuple) else value
        lines.append(yaml.safe_dump({option.name: plain}, default_flow_style=False, allow_unicode=True))
    return "".join(lines)


def option_help(kind: type[ServerConfig] = ServerConfig) -> Mapping[str, str]:
    """Return each option's help text: the string that follows it in the class body."""
    statements: list[ast.stmt] = []
    for owner in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        statements += body.body
    texts = {}
    for statement, following in pairwise(statements):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = inspect.cleandoc(text)
            case _:
                pass
    return texts


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _build_parser(kind: type[ServerConfig]) -> _Parser:
    is_batch = issubclass(kind, BatchConfig)
    parser = _Parser(
        prog="asyncserve run-batch" if is_batch else "asyncserve",
        usage=_BATCH_USAGE if is_batch else _SERVER_USAGE,
        description="Answer a file of requests in OpenAI's batch format, without a server."
        if is_batch
        else "Serve a language model over an OpenAI-compatible HTTP API.",
        epilog=_EPILOG,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options.")
    parser.add_argument(
        "--print-config", action="store_true", help="Print the options as they come out of all sources; stop."
    )
    parser.add_argument("--version", action="version", version=f"asyncserve {asyncserve.__version__}")
    hints = get_type_hints(kind)
    texts = option_help(kind)
    group: Any = parser
    for option in dataclasses.fields(kind):
        if option.name in GROUPS:
            group = parser.add_argument_group(GROUPS[option.name])
        if _is_positional(option):
            parser.add_argument(f"positional_{option.name}", nargs="?", help=argparse.SUPPRESS)
        _add_option(group, option, hints[option.name], texts.get(option.name, ""))
    return parser


def _add_option(group: Any, option: "dataclasses.Field[Any]", hint: Any, text: str) -> None:
    if not _is_required(option) and option.default not in (None, ()):
        default = " ".join(option.default) if isinstance(option.default, tuple) else option.default
        text = f"{text} Default: {default}."
    arguments: dict[str, Any] = {"help": text.replace("%", "%%")}
    hint = _without_none(hint)
    if hint is bool:
        arguments["action"] = argparse.BooleanOptionalAction
    elif get_origin(hint) is tuple:
        # At least one: `--api-key $KEY` with KEY unset must not mean "no key needed".
        arguments |= {"action": "extend", "nargs": "+", "type": _converter(get_args(hint)[0])}
    elif get_origin(hint) is Literal:
        arguments["choices"] = get_args(hint)
    else:
        arguments["type"] = _converter(hint)
    if hint is not bool and get_origin(hint) is not Literal:
        arguments["metavar"] = {int: "N", float: "X"}.get(hint, option.name.rpartition("_")[2].upper())
    alias = [option.metadata["alias"]] if "alias" in option.metadata else []
    group.add_argument(*alias, _flag(option.name), dest=option.name, **arguments)


def _parse(
    parser: _Parser, kind: type[ServerConfig], arguments: Sequence[str], *, source: str = ""
) -> dict[str, Any]:
    """Parse one source's arguments into the values it sets, and no others."""
    dashed = [re.sub(r"^--[^=]*", lambda flag: flag[0].replace("_", "-"), argument) for argument in arguments]
    try:
        namespace, unknown = parser.parse_known_args(dashed)
        if unknown:
            flag = unknown[0].partition("=")[0]
            raise ConfigError(f"unknown argument {flag}{_nearest(flag, parser._option_string_actions)}")
    except ConfigError as error:
        raise ConfigError(f"{source}{error}") from None
    values = vars(namespace)
    for option in dataclasses.fields(kind):
        positional = values.pop(f"positional_{option.name}", None)
        if positional is not None and values.setdefault(option.name, positional) != positional:
            raise ConfigError(f"{option.name} is given twice: {positional} and {values[option.name]}")
        if isinstance(values.get(option.name), list):
            values[option.name] = tuple(values[option.name])
    return values


def _environment_arguments(environ: Mapping[str, str], kind: type[ServerConfig]) -> list[str]:
    arguments: list[str] = []
    kinds = _value_kinds(kind)
    for variable, value in environ.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if variable == FAULTS_VARIABLE:
            continue
        if not variable.startswith(ENVIRONMENT_PREFIX) or (not value and name not in _secrets()):
            continue
        if name not in kinds:
            known = [ENVIRONMENT_PREFIX + option.upper() for option in kinds]
            logger.warning(
                "ignoring environment variable %s: no such option%s", variable, _nearest(variable, known)
            )
        elif re.match(r"(tcp|udp|sctp)://", value):
            # Kubernetes sets NAME_PORT=tcp://… in every pod for a service called NAME.
            logger.warning(
                "ignoring environment variable %s=%s: set by Kubernetes for a service", variable, value
            )
        else:
            values = value.split(",") if kinds[name] is tuple else value
            arguments += _arguments(name, values, kinds[name], source=f"in the environment: {variable}")
    return arguments


def _file_arguments(path: Path, kind: type[ServerConfig], source: str) -> list[str]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the --config file {path}: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict | None):
        raise ConfigError(f"{source}expected `option: value` lines, found a {type(content).__name__}")
    arguments: list[str] = []
    kinds = _value_kinds(kind)
    del kinds["config"]
    for key, value in (content or {}).items():
        name = str(key).replace("-", "_")
        if name not in kinds:
            raise ConfigError(f"{source}no such option {key!r}{_nearest(name, kinds)}")
        if value is not None:
            arguments += _arguments(name, value, kinds[name], source=f"{source}{key}")
    return arguments


def _arguments(name: str, value: object, kind: type, *, source: str) -> list[str]:
    """Spell one value of the environment or the file as command-line arguments."""
    flag = _flag(name)
    if kind is bool:
        switch = _SWITCHES.get(str(value).lower())
        if switch is None:
            raise ConfigError(f"{source} is {value!r}; it must be true or false")
        return [flag if switch else f"--no-{flag[2:]}"]
    values = value if isinstance(value, list) and kind is tuple else [value]
    for item in values:
        if not isinstance(item, str | int | float) or isinstance(item, bool):
            raise ConfigError(f"{source} is {item!r}; it must be a plain value")
    if not values:
        raise ConfigError(f"{source} is an empty list; leave it out")
    return [f"{flag}={item}" for item in values]


def _value_kinds(kind: type[ServerConfig]) -> dict[str, type]:
    """Return how each option is spelled: as a bool, a tuple (several values) or a str (anything else)."""
    kinds: dict[str, type] = {"config": str}
    for name, hint in get_type_hints(kind).items():
        bare = get_origin(hint) or hint
        kinds[name] = bare if bare in (bool, tuple) else str
    return kinds


def _secrets() -> set[str]:
    """Return the options that are never shown; an empty one is a mistake, not an absence."""
    return {option.name for option in dataclasses.fields(ServerConfig) if not option.repr}


def _converter(hint: type) -> Callable[[str], Any]:
    return _whole_number if hint is int else hint


def _whole_number(text: str) -> int:
    match = re.fullmatch(r"(-?\d+)|(-?\d+(?:\.\d+)?)(?:([kmgt])|([KMGT])(?:iB?)?|([kKMGT])B)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 4096, 32k or 4GiB")
    plain, number, thousands, binary, decimal_bytes = match.groups()
    if plain is not None:
        return int(plain)
    return int(float(number) * _FACTORS[thousands or binary or decimal_bytes.lower()])


def _without_none(hint: Any) -> Any:
    if get_origin(hint) is types.UnionType:
        return next(kind for kind in get_args(hint) if kind is not types.NoneType)
    return hint


def _is_required(option: "dataclasses.Field[Any]") -> bool:
    return option.default is dataclasses.MISSING and option.default_factory is dataclasses.MISSING


def _is_positional(option: "dataclasses.Field[Any]") -> bool:
    return bool(option.metadata.get("positional"))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; did you mean {found[0]}?" if found else ""

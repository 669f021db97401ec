"""`asyncserve` and `python -m asyncserve`: command line → `ServerConfig` → uvloop → `serve` or `run_batch`.

Exit status 0 after an orderly stop, 1 when the server could not start or failed, 2 when an option is wrong,
70 when the device was lost for good; `run_batch` says what else a batch may end with.
A wrong option or a failed start is one message on stderr, never a traceback. Once requests are answered, two
commands to try are printed on stdout.
"""

import os
import shlex
import sys
from functools import partial

from asyncserve.cli import read_config
from asyncserve.config import BatchConfig, ServerConfig
from asyncserve.errors import ConfigError, StartupError


def main() -> int:
    """Do what this process's command line and environment say; return the exit status."""
    argv = sys.argv[1:]
    config: ServerConfig
    try:
        if argv[:1] == ["run-batch"]:
            config = read_config(argv[1:], os.environ, BatchConfig)
        else:
            config = read_config(argv, os.environ, ServerConfig)
    except ConfigError as error:
        return _refuse(error)
    # Only now: a wrong option is reported at once, not after the server's packages have been imported.
    import uvloop

    try:
        if isinstance(config, BatchConfig):
            from asyncserve.run_batch import run_batch

            return uvloop.run(run_batch(config))
        from asyncserve.serve import serve

        return uvloop.run(serve(config, on_ready=partial(_print_examples, config)))
    except ConfigError as error:  # of an option that could only be judged by a file, the model or the device
        return _refuse(error)
    except StartupError as error:
        print(f"asyncserve: cannot start: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _refuse(error: ConfigError) -> int:
    print(f"asyncserve: error: {error}", file=sys.stderr)
    return 2


def _print_examples(config: ServerConfig, url: str) -> None:
    """Print one plain and one streaming request for the server at `url` (`unix:PATH` for a Unix socket)."""
    socket = url.removeprefix("unix:") if url.startswith("unix:") else None
    address = f"--unix-socket {shlex.quote(socket)} http://localhost" if socket else url
    key = '-H "Authorization: Bearer $API_KEY" ' if config.api_key or config.api_key_file else ""
    model = config.model_names[0].replace("\\", r"\\").replace('"', r"\"")
    plain = f'{{"model": "{model}", "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}}'
    question = '{"role": "user", "content": "What is the capital of France?"}'
    stream = f'{{"model": "{model}", "messages": [{question}], "max_tokens": 64, "stream": true}}'
    print("\nReady. Try:\n", flush=False)
    for flags, path, body in (("-s", "completions", plain), ("-sN", "chat/completions", stream)):
        header = f"{key}-H 'Content-Type: application/json'"
        print(f"  curl {flags} {address}/v1/{path} {header} -d {shlex.quote(body)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m loadtest.gpu`: measure everything, or the parts named, on the GPU of this machine.

Each part runs in a process of its own and may fail alone; JSON and tables are written after every row. There
are two quicker looks at decode steps alone, the engine driven directly: `--steps` (times) and `--profile`
(kernels).
`--combine` measures nothing and makes one table of the files of several runs. Exit status 0 if every part was
done, 1 if not, 2 for a wrong option.
"""

import argparse
import datetime
import json
import shlex
import signal
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from loadtest import figures
from loadtest.engine_options import read_option
from loadtest.gpu import parts
from loadtest.gpu.extent import ALL_MEASUREMENTS, FULL, MEASUREMENTS, QUICK
from loadtest.gpu.parts import Job, Part
from loadtest.gpu.results import Results, combined, markdown
from loadtest.gpu.vocabulary import write_tokenizer
from loadtest.model_shapes import Shape, known_shapes

RESULTS = Path(__file__).parent.parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    try:
        shapes = known_shapes(arguments.shape)
        further = dict(map(read_option, arguments.option))
        chosen = _chosen(arguments, shapes)
    except ValueError as error:
        print(f"loadtest.gpu: error: {error}", file=sys.stderr)
        return 2
    if arguments.combine:
        return _combine(arguments)
    if arguments.part is not None:
        job = Job(
            tokenizers=arguments.tokenizers,
            extent=QUICK if arguments.quick else FULL,
            further=further,
            measurements=arguments.measure,
            batches=arguments.batches,
            num_steps=arguments.num_steps,
            temperature=arguments.temperature,
            trace=arguments.trace,
        )
        (part,) = (part for part in chosen if part.name == arguments.part)
        return parts.perform(part, job, arguments.rows_to)
    with tempfile.TemporaryDirectory(prefix="loadtest-tokenizers-") as folder:
        for shape in shapes:
            write_tokenizer(Path(folder) / shape.name, shape.vocab_size)
        now = datetime.datetime.now(datetime.UTC)
        is_kept = not (arguments.steps or arguments.profile)
        file = arguments.out or (RESULTS / f"gpu-{now:%Y-%m-%d-%H%M}.json" if is_kept else None)
        results = Results(_about(arguments, argv, now), file)
        try:
            command = [sys.executable, "-m", "loadtest.gpu", *argv, "--tokenizers", folder]
            return _run_parts(chosen, command, results)
        except KeyboardInterrupt:
            return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="Parts whose name contains one of these words."
    )
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="WORD", help="Parts to leave out, named in the same way."
    )
    parser.add_argument(
        "--shape", nargs="+", default=[], help="Models: names in loadtest/shapes, or folders. Default: all."
    )
    parser.add_argument("--quick", action="store_true", help="Fewer repeats and requests.")
    parser.add_argument(
        "--measure",
        nargs="+",
        default=MEASUREMENTS,
        choices=ALL_MEASUREMENTS,
        help="Of the offline measurements, those to make. Default: all but capacity, which wants a pool of a "
        "given size and slots for all that fit (--option kv_cache_memory_bytes=… max_num_seqs=512).",
    )
    parser.add_argument(
        "--option",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="Options of engine and server, such as enforce_eager=True.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="JSON file for everything measured; its neighbour .md gets the tables. Default: a new one in "
        "loadtest/results, and none with --steps and --profile.",
    )
    parser.add_argument("--label", default="", help="Said in the files.")
    parser.add_argument("--commit", default=None, help="Said in the files, where there is no git.")
    here = parser.add_argument_group("decode steps alone")
    here.add_argument("--steps", action="store_true", help="Time them.")
    here.add_argument("--profile", action="store_true", help="List their kernels.")
    here.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256], help="Rows that decode.")
    here.add_argument("--num-steps", type=int, default=100, help="Steps of each batch. Default: 100.")
    here.add_argument("--temperature", type=float, default=0.0, help="Of --steps. Default: 0.")
    here.add_argument("--trace", type=Path, default=None, help="Folder for --profile's files for a viewer.")
    parser.add_argument(
        "--combine", type=Path, nargs="+", default=[], metavar="JSON", help="Print the tables of these files."
    )
    # How a part's process is told what to do.
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--rows-to", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizers", type=Path, default=None, help=argparse.SUPPRESS)
    return parser


def _chosen(arguments: argparse.Namespace, shapes: Sequence[Shape]) -> list[Part]:
    if arguments.steps or arguments.profile:
        return parts.step_parts("steps" if arguments.steps else "profile", shapes)
    return parts.all_parts(shapes, arguments.only, arguments.skip)


def _interrupt(number: int, frame: types.FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _about(arguments: argparse.Namespace, argv: Sequence[str], now: datetime.datetime) -> dict[str, Any]:
    return {
        "date": now.isoformat(timespec="seconds"),
        "commit": arguments.commit or figures.commit(),
        "label": arguments.label,
        "command": shlex.join(["python", "-m", "loadtest.gpu", *_without_out(argv)]),
        "versions": figures.versions(),
    }


def _without_out(argv: Sequence[str]) -> list[str]:
    """Return the arguments without where the files go, which says nothing of the figures."""
    kept = list(argv)
    if "--out" in kept:
        place = kept.index("--out")
        del kept[place : place + 2]
    return kept


def _run_parts(chosen: Sequence[Part], command: Sequence[str], results: Results) -> int:
    is_done = True
    for part in chosen:
        print(f"== {part.name}", flush=True)
        results.begin(part)
        outcome = parts.run(part, command, lambda row: print(results.add(row), flush=True))
        results.end(outcome)
        is_done = is_done and outcome.status == "done"
        error = f": {outcome.error}" if outcome.error else ""
        print(f"   {outcome.status} in {outcome.took_s:.1f} s{error}", flush=True)
    print(f"\n{markdown([results.content])}", flush=True)
    return 0 if is_done else 1


def _combine(arguments: argparse.Namespace) -> int:
    runs = combined([json.loads(file.read_text(encoding="utf-8")) for file in arguments.combine])
    text = markdown(runs)
    if arguments.out is not None:
        arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    # SIGTERM ends what was started, as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())

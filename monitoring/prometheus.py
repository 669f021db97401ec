"""A real Prometheus that scrapes a server: `python -m monitoring.prometheus --url http://127.0.0.1:8000`.

Takes a server's URL and gives a running Prometheus with this folder's rules. The program is the one that is
installed, or else Debian's package, unpacked in `.prometheus/` without being installed. Knows no metric.
"""

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import yaml

FOLDER = Path(__file__).parent
CONFIG = FOLDER / "prometheus.yml"
UNPACKED = FOLDER.parent / ".prometheus" / "package"
DATA = FOLDER.parent / ".prometheus" / "data"
PACKAGE = "prometheus"
PROGRAMS = ("prometheus", "promtool")


class NotThere(Exception):
    """Prometheus is not installed, and its package cannot be had."""


def find_programs(unpacked: Path = UNPACKED) -> dict[str, Path]:
    """Return the paths of Prometheus and promtool, fetching the package if they are not there.

    Raises:
        NotThere: With the reason.
    """
    unpacked.parent.mkdir(parents=True, exist_ok=True)
    with (unpacked.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests in several processes fetch it once
        if _installed(unpacked) is None:
            fetch(unpacked)
        found = _installed(unpacked)
    if found is None:
        raise NotThere(f"Debian's package {PACKAGE} has not both {' and '.join(PROGRAMS)}")
    return found


def fetch(unpacked: Path) -> None:
    """Download Debian's package and unpack it.

    Raises:
        NotThere: With the reason.
    """
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise NotThere(
                f"Prometheus is not installed, and there is no {program} to fetch Debian's package"
            )
    with tempfile.TemporaryDirectory() as folder:
        download = ["apt-get", "download", PACKAGE]
        outcome = _run(download, folder)
        if outcome.returncode:  # a fresh system has no list of packages
            _run(["apt-get", "update"], folder)
            outcome = _run(download, folder)
        packages = list(Path(folder).glob("*.deb"))
        if not packages:
            raise NotThere(f"Debian's package {PACKAGE} cannot be fetched: {outcome.stderr.strip()}")
        shutil.rmtree(unpacked, ignore_errors=True)
        subprocess.run(["dpkg-deb", "-x", packages[0], unpacked], check=True)


def config_for(
    url: str, *, api_key: str | None = None, interval_s: float = 5.0, evaluation_interval_s: float = 15.0
) -> str:
    """Return the configuration that scrapes one server, with this folder's rules.

    Args:
        url: The server's, as it is used by clients; `/metrics` stands below it.
        api_key: Sent as a bearer token.
    """
    parts = urlsplit(url)
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["global"]["scrape_interval"] = f"{round(interval_s * 1000)}ms"
    config["global"]["evaluation_interval"] = f"{round(evaluation_interval_s * 1000)}ms"
    config["rule_files"] = [str(FOLDER / pattern) for pattern in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["scheme"] = parts.scheme
    job["metrics_path"] = f"{parts.path.rstrip('/')}/metrics"
    job["static_configs"] = [{"targets": [parts.netloc]}]
    if api_key:
        job["authorization"] = {"credentials": api_key}
    text: str = yaml.safe_dump(config, sort_keys=False)
    return text


def command(program: Path, folder: Path, *, listen: str) -> list[str]:
    """Return the command line of a Prometheus whose configuration and data are in `folder`."""
    return [
        str(program),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={listen}",
        "--storage.tsdb.retention.time=15d",
        "--log.level=warn",
    ]


def main() -> None:
    """Become a Prometheus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server to scrape")
    parser.add_argument("--listen", default="127.0.0.1:9090", help="where Prometheus answers")
    parser.add_argument("--data", type=Path, default=DATA, help="folder that keeps what it has scraped")
    options = parser.parse_args()
    try:
        program = find_programs()["prometheus"]
    except NotThere as error:
        sys.exit(str(error))
    options.data.mkdir(parents=True, exist_ok=True)
    config = options.data / "prometheus.yml"
    config.touch(mode=0o600)  # it may hold a key
    config.write_text(config_for(options.url, api_key=os.environ.get("API_KEY")), encoding="utf-8")
    print(f"Prometheus on http://{options.listen} scrapes {options.url}; Ctrl-C ends it.")
    if program.is_relative_to(UNPACKED):
        print("Its own pages are there only if it is installed: apt-get install prometheus")
    print(
        f"Grafana: docker compose -f {FOLDER / 'compose.yml'} up grafana, or see docs/monitoring.md",
        flush=True,
    )
    line = command(program, options.data, listen=options.listen)
    os.execv(line[0], line)


def _installed(unpacked: Path) -> dict[str, Path] | None:
    """Return the programs' paths if all are there."""
    paths = [shutil.which(name) or shutil.which(name, path=unpacked / "usr/bin") for name in PROGRAMS]
    found = {name: Path(path) for name, path in zip(PROGRAMS, paths, strict=True) if path is not None}
    return found if len(found) == len(PROGRAMS) else None


def _run(line: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()

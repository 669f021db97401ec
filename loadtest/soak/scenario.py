"""What a soak does, as its scenario file says: `Scenario`, read from TOML, unknown fields refused."""

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCENARIOS = Path(__file__).parents[1] / "scenarios" / "soak"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One soak.

    Args:
        guests: Clients at once.
        idle_connections: Kept open throughout, with one request at the beginning of each.
        burst_len: Clients that come at once, now and then, besides.
        burst_interval_s: How often.
        warm_share: Share of the time after which memory counts.
        keys: API keys of the guests.
        questions: Arguments of `questions.draw`.
        policies: Of scheduling: a server for each, one after the other, shares the time.
        server: Further options of the server, by their field names.
        faults: Parts of ASYNCSERVE_FAULTS.
        visits: Weights of the kinds of visit, of `Guests`.
    """

    guests: int
    idle_connections: int = 0
    burst_len: int = 0
    burst_interval_s: float = 20.0
    warm_share: float = 0.25
    keys: tuple[str, ...] = ()
    policies: tuple[str, ...] = ("fcfs",)
    questions: Mapping[str, Any]
    server: Mapping[str, Any]
    faults: Mapping[str, str]
    visits: Mapping[str, float]

    @property
    def faults_text(self) -> str:
        """The value of ASYNCSERVE_FAULTS."""
        return ",".join(f"{kind}={value}" for kind, value in self.faults.items())


def read_scenario(name: str) -> Scenario:
    """Read a file, or the scenario of this name in `loadtest/scenarios/soak`.

    Raises:
        ValueError: There is none, or it has a field that is none.
    """
    path = Path(name) if name.endswith(".toml") else SCENARIOS / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in SCENARIOS.glob("*.toml")))
        raise ValueError(f"no soak {name!r}; there are {known}")
    content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    unknown = set(content) - {field.name for field in dataclasses.fields(Scenario)}
    if unknown:
        raise ValueError(f"{path}: unknown field {min(unknown)}")
    lists: dict[str, Any] = {name: tuple(content[name]) for name in ("keys", "policies") if name in content}
    return Scenario(**{**content, **lists})

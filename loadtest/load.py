"""One load: what is asked, how much of it, when. `Load` is a row of a scenario file, and of a results file.

Draws its items (prompts, conversations) and their arrival times from its seed; knows neither the command line
nor the server. A data set needs its `Dataset`, which is read once for all loads.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest import sharegpt
from loadtest.workload import Conversation, Sample, longest, multi_turn, random_tokens, text

WORKLOADS = ("random", "text", "prefix-repetition", "sharegpt", "multi-turn")
ENDPOINTS = ("completions", "chat")
WORKLOAD_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # As those of `vllm bench serve --dataset-name prefix_repetition`.
    "prefix-repetition": {"num_prefixes": 10, "prefix_len": 256, "input_len": 256},
    "multi-turn": {"input_len": 32, "output_len": 64},
}
"""Values that a workload has where none is given."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """A file of conversations, and who counts its tokens."""

    dialogues: Sequence[Sequence[sharegpt.Exchange]]
    count: Callable[[str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run's options; names and meanings as on the command line."""

    workload: str = "random"
    endpoint: str = "completions"
    num_requests: int = 100
    input_len: int = 128
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    requests_per_prefix: int | None = None
    num_turns: int = 4
    think_time: float = 0.0
    dataset_path: str | None = None
    sharegpt_output_len: int | None = None
    vocab_size: int = 32_000
    concurrency: int | None = None
    rate: float = math.inf
    burst_size: int = 1
    seed: int
    temperature: float = 0.0
    warmup: int = 1
    repeat: int = 1
    timeout: float = 600.0

    @property
    def name(self) -> str:
        """What tells this run from others."""
        arrival = "all at once" if self.rate == math.inf else f"{self.rate:g}/s"
        if self.burst_size > 1:
            arrival += f" in bursts of {self.burst_size}"
        if self.concurrency is not None:
            arrival = f"concurrency {self.concurrency}" + ("" if self.rate == math.inf else f", {arrival}")
        kind = self.workload if self.endpoint == "completions" else f"{self.endpoint}, {self.workload}"
        return f"{kind} {self._lengths}, {arrival}"

    @property
    def _lengths(self) -> str:
        exchange = f"{self.input_len}+{self.output_len}"
        if self.workload == "prefix-repetition":
            return f"{self.num_prefixes} x {self.prefix_len}+{exchange}"
        if self.workload == "multi-turn" and self.dataset_path is None:
            return f"{self.num_turns} x {exchange}"
        if self.dataset_path is not None:
            return Path(self.dataset_path).name
        return exchange

    @property
    def has_token_ids(self) -> bool:
        """Whether prompts are token ids, and lengths hence exact."""
        return self.endpoint == "completions" and self.workload in ("random", "prefix-repetition")

    @property
    def most_tokens(self) -> int:
        """The greatest length of prompt and output together, where prompts are token ids."""
        lengths = (longest(mean, self.range_ratio) for mean in (self.input_len, self.output_len))
        return self.prefix_len + sum(lengths)

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ValueError: Says which option and why.
        """
        if self.workload not in WORKLOADS:
            raise ValueError(f"there is no workload {self.workload!r}; there are {', '.join(WORKLOADS)}")
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"there is no endpoint {self.endpoint!r}; there are {', '.join(ENDPOINTS)}")
        if self.endpoint == "chat" and self.workload == "random":
            raise ValueError(
                "random prompts are token ids, which only completions takes: use --workload text"
            )
        if self.workload == "sharegpt" and self.dataset_path is None:
            raise ValueError("--workload sharegpt needs --dataset-path, a file in ShareGPT's format")
        if not 0.0 <= self.range_ratio < 1.0:
            raise ValueError(f"range-ratio is {self.range_ratio}; it must lie in [0, 1)")
        for name in _ABOVE_0:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name.replace('_', '-')} is {value}; it must be above 0")

    def changed(self, **values: Any) -> "Load":
        """Return this load with some of its values changed.

        Raises:
            ValueError: It cannot be run.
        """
        load = dataclasses.replace(self, **values)
        load.check()
        return load

    def items(
        self, count: int, seed: str, dataset: Dataset | None = None
    ) -> list[Sample] | list[Conversation]:
        """Draw what is sent: prompts, or conversations.

        Args:
            count: How many.
            seed: The same seed draws the same.
            dataset: Needed where there is a `dataset_path`.
        """
        if self.dataset_path is not None:
            assert dataset is not None
            return self._from_dataset(count, seed, dataset)
        lengths: dict[str, Any] = {
            "input_len": self.input_len,
            "output_len": self.output_len,
            "range_ratio": self.range_ratio,
            "prefix_len": self.prefix_len,
            "seed": seed,
        }
        if self.workload == "multi-turn":
            return multi_turn(count, num_turns=self.num_turns, think_time_s=self.think_time, **lengths)
        if self.has_token_ids:
            return random_tokens(count, vocab_size=self.vocab_size, num_prefixes=self.num_prefixes, **lengths)
        return text(count, num_prefixes=self.num_prefixes, **lengths)

    def _from_dataset(self, count: int, seed: str, dataset: Dataset) -> list[Sample] | list[Conversation]:
        options: dict[str, Any] = {
            "count": dataset.count,
            "output_len": self.sharegpt_output_len,
            "seed": seed,
        }
        if self.workload == "multi-turn":
            return sharegpt.conversations(
                dataset.dialogues, count, num_turns=self.num_turns, think_time_s=self.think_time, **options
            )
        return sharegpt.samples(dataset.dialogues, count, **options)

    def plain(self) -> dict[str, Any]:
        """Return plain values for a JSON file; no limit of the rate becomes None."""
        values = dataclasses.asdict(self)
        return values | {"rate": None if self.rate == math.inf else self.rate}


_ABOVE_0 = (
    "num_requests",
    "input_len",
    "output_len",
    "num_prefixes",
    "requests_per_prefix",
    "num_turns",
    "sharegpt_output_len",
    "burst_size",
    "repeat",
    "concurrency",
    "rate",
    "timeout",
)
NOT_OF_THE_LOAD = frozenset({"seed", "repeat", "warmup", "timeout"})
"""Fields that may differ between two runs of one load."""


def made(values: Mapping[str, Any], seed: int) -> Load:
    """Make a load of what is given, with its workload's defaults for the rest.

    Raises:
        ValueError: It cannot be run.
        TypeError: There is no such option.
    """
    defaults = WORKLOAD_DEFAULTS.get(str(values.get("workload")), {})
    load = Load(**({"seed": seed} | dict(defaults) | dict(values)))
    if load.requests_per_prefix is not None:
        load = dataclasses.replace(load, num_requests=load.num_prefixes * load.requests_per_prefix)
    load.check()
    return load


def identity(plain: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return what makes two runs runs of the same load: their fields, without seeds and defaults.

    Args:
        plain: A load as a results file holds it, of this version or an older one with fewer fields.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(Load)} | {"rate": None}
    return tuple(
        sorted(
            (name, value)
            for name, value in plain.items()
            if name not in NOT_OF_THE_LOAD and value != defaults.get(name)
        )
    )

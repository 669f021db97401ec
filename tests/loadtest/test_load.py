from typing import Any

import pytest

from loadtest.load import Dataset, Load, identity, made
from loadtest.workload import Conversation, Sample


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "random 128+128, all at once"),
        ({"concurrency": 4, "rate": 2.0}, "random 128+128, concurrency 4, 2/s"),
        (
            {"workload": "prefix-repetition", "endpoint": "chat", "rate": 1.0},
            "chat, prefix-repetition 10 x 256+256+128, 1/s",
        ),
        ({"workload": "multi-turn", "concurrency": 2}, "multi-turn 4 x 32+64, concurrency 2"),
        ({"workload": "sharegpt", "dataset_path": "a/b.json"}, "sharegpt b.json, all at once"),
    ],
)
def test_a_load_is_named_by_what_it_asks_and_when(values: dict[str, Any], name: str) -> None:
    assert made(values, seed=1).name == name


def test_a_workload_has_defaults_of_its_own_that_give_way() -> None:
    load = made({"workload": "prefix-repetition", "prefix_len": 8, "requests_per_prefix": 3}, seed=1)
    assert (load.prefix_len, load.input_len, load.num_prefixes, load.num_requests) == (8, 256, 10, 30)


def test_every_workload_draws_what_its_endpoint_takes() -> None:
    dataset = Dataset([[("five words are in here", "and four are here")] * 2], lambda text: len(text.split()))
    kinds: dict[tuple[str, str], type] = {
        ("random", "completions"): tuple,
        ("text", "chat"): str,
        ("prefix-repetition", "completions"): tuple,
        ("prefix-repetition", "chat"): str,
        ("sharegpt", "completions"): str,
        ("sharegpt", "chat"): str,
    }
    for (workload, endpoint), kind in kinds.items():
        path = "file" if workload == "sharegpt" else None
        load = made({"workload": workload, "endpoint": endpoint, "dataset_path": path}, seed=1)
        for item in load.items(3, "seed", dataset):
            assert isinstance(item, Sample)
            assert isinstance(item.prompt, kind), workload
    for path in (None, "file"):
        load = made({"workload": "multi-turn", "dataset_path": path, "num_turns": 2}, seed=1)
        assert all(isinstance(item, Conversation) for item in load.items(3, "seed", dataset))


def test_the_same_load_is_the_same_whatever_its_seed_and_however_old_its_file() -> None:
    today = made({"concurrency": 4, "repeat": 3}, seed=1).plain()
    old = {"workload": "random", "concurrency": 4, "rate": None, "seed": 7, "num_requests": 100}
    assert identity(today) == identity(old) == (("concurrency", 4),)
    assert identity(made({"concurrency": 8}, seed=1).plain()) != identity(today)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"workload": "sharegpt"}, "dataset-path"),
        ({"workload": "other"}, "prefix-repetition"),
        ({"endpoint": "other"}, "completions"),
        ({"num_turns": 0}, "num-turns"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_what_cannot_be_run_is_refused(values: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        made(values, seed=1)


def test_lengths_are_known_where_prompts_are_token_ids() -> None:
    load = made({"workload": "prefix-repetition", "prefix_len": 10, "input_len": 5, "output_len": 4}, seed=1)
    assert (load.has_token_ids, load.most_tokens) == (True, 19)
    assert not Load(seed=1, workload="text").has_token_ids

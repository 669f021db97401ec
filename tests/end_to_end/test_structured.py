"""Structured output through everything: xgrammar's worker, the scheduler, a tiny model on a CPU."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from asyncserve import LLM, SamplingParams
from asyncserve.errors import InvalidRequest
from asyncserve.offline import Completion
from asyncserve.request import FinishReason, StructuredOutput, StructureKind
from tests.end_to_end.test_equalities import TINY
from tests.fakes.tiny_model import tiny_llama_folder
from tests.fakes.tiny_tokenizer import write_tiny_tokenizer
from tests.loop.schema_corpus import SCHEMAS
from tests.loop.test_grammar import ENDLESS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NUM_TOKENS = 60


def structure(kind: StructureKind, source: object = "") -> StructuredOutput:
    return StructuredOutput(kind=kind, source=source if isinstance(source, str) else json.dumps(source))


MIXED = [
    None,
    structure(StructureKind.JSON_SCHEMA, SCHEMAS["flat object"]),
    structure(StructureKind.CHOICE, ["yes", "no", "yesterday, all my troubles seemed so far away"]),
    None,
    structure(StructureKind.REGEX, "[a-f]{3}(-[0-9]{2,4})+!"),
    structure(StructureKind.JSON_SCHEMA, SCHEMAS["tree"]),
    structure(StructureKind.GRAMMAR, 'root ::= "(" root ")" | [a-z]+'),
    structure(StructureKind.JSON_OBJECT),
]
SAMPLED = {"temperature": 1.2, "top_p": 0.95, "frequency_penalty": 0.4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("tiny"))
    write_tiny_tokenizer(folder, vocab_size=320)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **TINY, kv_cache_memory_bytes=1 << 23) as llm:
        yield llm


def prompts() -> list[list[int]]:
    return [[3 + (7 * place + 31 * row) % 256 for place in range(5 + 6 * row)] for row in range(len(MIXED))]


def params(**fields: Any) -> list[SamplingParams]:
    """For each prompt its own structure and seed."""
    return [
        SamplingParams(
            max_tokens=NUM_TOKENS, structured=structured, seed=row, ignore_eos=row % 2 == 0, **fields
        )
        for row, structured in enumerate(MIXED)
    ]


def tokens(completions: Sequence[Completion]) -> list[list[tuple[int, ...]]]:
    return [[output.token_ids for output in completion.outputs] for completion in completions]


@pytest.fixture(scope="module", params=["greedy", "sampled"])
def fields(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"temperature": 0.0} if request.param == "greedy" else SAMPLED


@pytest.fixture(scope="module")
def alone(model: Path, fields: dict[str, Any]) -> list[list[tuple[int, ...]]]:
    """Every prompt by itself, whole, without cache and without planning ahead."""
    options: dict[str, Any] = {
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": 1 << 22,
    }
    with LLM(str(model), **TINY, **options) as llm:
        return tokens(llm.generate(prompts(), params(**fields), progress=False))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enable_prefix_caching": False, "async_scheduling": False}, id="batched"),
        pytest.param({}, id="one step ahead, prefix cache"),
        pytest.param({"max_num_batched_tokens": 9, "max_num_seqs": 5}, id="chunked prefill"),
        pytest.param({"num_gpu_blocks_override": 18, "max_model_len": 128}, id="preempted"),
    ],
)
def test_outputs_do_not_depend_on_how_they_are_served(
    model: Path, fields: dict[str, Any], alone: list[list[tuple[int, ...]]], options: dict[str, Any]
) -> None:
    if "num_gpu_blocks_override" not in options:
        options = {"kv_cache_memory_bytes": 1 << 22, **options}
    with LLM(str(model), **TINY, **options) as llm:
        for _ in range(2):  # then with grammars and prefixes that are kept
            assert tokens(llm.generate(prompts(), params(**fields), progress=False)) == alone
        assert (llm.statistics().num_preemptions > 0) == ("num_gpu_blocks_override" in options)


def test_prompts_of_free_neighbours_get_what_they_get_by_themselves(
    llm: LLM, alone: list[list[tuple[int, ...]]], fields: dict[str, Any]
) -> None:
    free = [row for row, structured in enumerate(MIXED) if structured is None]
    asked = params(**fields)
    for row in free:
        assert tokens(llm.generate([prompts()[row]], asked[row], progress=False)) == [alone[row]]


def test_every_output_of_every_schema_satisfies_it(llm: LLM) -> None:
    names = list(SCHEMAS)
    asked = [
        SamplingParams(
            max_tokens=200,
            temperature=1.0,
            seed=4,
            n=3,
            structured=structure(StructureKind.JSON_SCHEMA, SCHEMAS[name]),
            # The model writes at random: closing what it opened is made likelier.
            logit_bias={3 + ord(sign) - 33: 4.0 for sign in '"}]'},
        )
        for name in names
    ]
    ended: dict[str, int] = dict.fromkeys(names, 0)
    for name, completion in zip(
        names, llm.generate([[5, 6, 7]] * len(names), asked, progress=False), strict=True
    ):
        validator = jsonschema.Draft202012Validator(SCHEMAS[name])
        for output in completion.outputs:
            assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            if output.finish_reason is FinishReason.STOP:
                validator.validate(json.loads(output.text))
                ended[name] += 1
    assert sum(map(bool, ended.values())) >= 0.9 * len(names), ended


def test_choices_of_one_request_differ_and_all_follow_the_grammar(llm: LLM) -> None:
    structured = structure(StructureKind.REGEX, "[a-z]{8}")
    sampling = SamplingParams(max_tokens=20, temperature=1.5, seed=1, n=3, structured=structured)
    (completion,) = llm.generate([[5, 6, 7]], sampling, progress=False)
    texts = [output.text for output in completion.outputs]
    assert len(set(texts)) == 3
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)
    assert tokens(llm.generate([[5, 6, 7]], sampling, progress=False)) == tokens([completion])


@pytest.mark.parametrize(
    "structured",
    [
        structure(StructureKind.CHOICE, ["the only answer"]),
        structure(StructureKind.REGEX, "the only answer"),
        structure(StructureKind.GRAMMAR, 'root ::= "the only answer"'),
        structure(
            StructureKind.STRUCTURAL_TAG,
            {"type": "structural_tag", "format": {"type": "const_string", "value": "the only answer"}},
        ),
    ],
    ids=lambda structured: structured.kind.value,
)
def test_a_structure_with_one_text_yields_it(llm: LLM, structured: StructuredOutput) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, structured=structured, ignore_eos=True)
    (completion,) = llm.generate([[5, 6, 7]], sampling, progress=False)
    assert completion.outputs[0].text == "the only answer"
    assert completion.outputs[0].finish_reason is FinishReason.STOP


def test_what_cannot_be_compiled_in_time_or_at_all_is_refused_and_the_engine_goes_on(model: Path) -> None:
    yes = SamplingParams(max_tokens=9, structured=structure(StructureKind.CHOICE, ["yes"]))
    options = {"kv_cache_memory_bytes": 1 << 22, "grammar_compile_timeout": 5.0}
    with LLM(str(model), **TINY, **options) as llm:
        for structured, message in (
            (structure(StructureKind.GRAMMAR, "root ::= nothing"), "is not defined"),
            (structure(StructureKind.JSON_SCHEMA, {"not": {}}), "the keyword not is not supported"),
            (ENDLESS, "takes longer than 5 s"),
        ):
            with pytest.raises(InvalidRequest, match=message) as caught:
                llm.generate([[5]], SamplingParams(structured=structured), progress=False)
            assert caught.value.param == "response_format"
            (completion,) = llm.generate([[5]], yes, progress=False)
            assert completion.outputs[0].text == "yes"

import pytest

from asyncserve.http.refusals import REFUSED
from tests.http.live import live_server


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v2/embed", "embeddings"),
        ("/pooling", "embeddings"),
        ("/rerank", "scores"),
        ("/v1/rerank", "scores"),
        ("/v2/rerank", "scores"),
        ("/score", "scores"),
        ("/v1/score", "scores"),
        ("/classify", "scores"),
        ("/v1/moderations", "scores"),
        ("/v1/audio/transcriptions", "hears"),
        ("/v1/audio/speech", "hears"),
        ("/v1/images/generations", "images"),
        ("/v1/files", "run-batch"),
        ("/v1/files/f-1/content", "run-batch"),
        ("/v1/batches", "run-batch"),
        ("/v1/assistants", "/v1/responses"),
        ("/v1/threads/t-1/runs", "/v1/responses"),
        ("/v1/conversations", "/v1/responses"),
    ],
)
async def test_what_a_causal_model_cannot_do_is_refused_with_a_reason_that_clients_do_not_retry(
    path: str, word: str
) -> None:
    async with live_server() as live:
        for answer in (await live.call(path, {"input": "x"}), await live.call(path)):
            assert answer.status == 400
            assert answer.error["code"] == "unsupported_endpoint"
            assert path in answer.error["message"]
            assert "causal language model" in answer.error["message"]
            assert word in answer.error["message"]


async def test_a_refusal_needs_a_key_like_everything_else() -> None:
    async with live_server(api_keys=("k",)) as live:
        assert (await live.call("/v1/embeddings", {})).status == 401


def test_no_path_is_refused_without_a_reason() -> None:
    assert all(len(reason) > 10 for reason in REFUSED.values())

"""Endpoints that clients know from other servers and that a causal language model has no answer for.

One table says which, and why. They are answered with 400, not 404 or 501: clients of OpenAI's API try again
after a 5xx, and take a 404 for a wrong base URL; after a 400 they show the message and stop.
"""

from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from asyncserve.http.failures import UnsupportedEndpoint, shown_path

_EMBEDDING = "computes no embeddings; serve an embedding model elsewhere for it"
_SCORING = "gives no scores or classes of texts; serve a reranking or classifying model elsewhere for it"
_AUDIO = "neither hears nor speaks"
_IMAGES = "makes no images"
_BATCHES = "batches of requests are run offline, by `asyncserve run-batch MODEL -i in.jsonl -o out.jsonl`"
_AGENTS = "conversations are kept by clients, or by /v1/responses"

REFUSED: Mapping[str, str] = {
    "/v1/embeddings": _EMBEDDING,
    "/v2/embed": _EMBEDDING,
    "/pooling": _EMBEDDING,
    "/rerank": _SCORING,
    "/v1/rerank": _SCORING,
    "/v2/rerank": _SCORING,
    "/score": _SCORING,
    "/v1/score": _SCORING,
    "/classify": _SCORING,
    "/v1/classify": _SCORING,
    "/v1/moderations": _SCORING,
    "/v1/audio": _AUDIO,
    "/v1/realtime": _AUDIO,
    "/v1/images": _IMAGES,
    "/v1/files": _BATCHES,
    "/v1/uploads": _BATCHES,
    "/v1/batches": _BATCHES,
    "/v1/assistants": _AGENTS,
    "/v1/conversations": _AGENTS,
    "/v1/threads": _AGENTS,
    "/v1/vector_stores": _EMBEDDING,
    "/v1/fine_tuning": "is not trained here",
}
"""Path, with what is below it, to what its clients are told of the model, or of what there is instead."""


def refusals() -> list[web.RouteDef]:
    """Return routes that refuse every method of every path in `REFUSED`."""
    return [
        web.route("*", path + below, _refuse(reason))
        for path, reason in REFUSED.items()
        for below in ("", "/{rest:.*}")
    ]


def _refuse(reason: str) -> Handler:
    ending = f"; {reason}" if reason in (_BATCHES, _AGENTS) else f", which {reason}"

    async def refuse(request: web.Request) -> web.StreamResponse:
        raise UnsupportedEndpoint(
            f"{shown_path(request)} is not supported: the model served here is a causal language model"
            f"{ending}"
        )

    return refuse

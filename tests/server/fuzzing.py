"""Requests made up after the OpenAPI document, and what their answers must be."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from beheld.server.openapi import document

ALIASES = ("/v1/score", "/v1/rerank", "/v2/rerank")
OPERATIONS: list[Any] = [result.ok() for result in schemathesis.openapi.from_dict(document()).get_all_operations()]  # type: ignore[union-attr]
# What bounds an answer, by route.
LONGEST = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
# What the document allows may still be refused: fields must fit together, and ids must be in the vocabulary.
LOOKED_AT = {
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
}


def check(url: str, operation: Any, mode: GenerationMode, examples: int) -> list[int]:
    """What the document allows and what it does not: never a 5xx, and always an answer that the document tells of.

    Returns:
        The answers' statuses.
    """
    statuses: list[int] = []
    if not operation.body and mode is GenerationMode.NEGATIVE:
        # There is nothing in it that could be wrong.
        return statuses
    strategy = operation.as_strategy(generation_mode=mode)

    @seed(7)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def one(case: Any) -> None:
        body = case.body
        name = LONGEST.get(operation.path) if mode is GenerationMode.POSITIVE else None
        if isinstance(body, dict) and name is not None:
            # Long answers are no matter of the document.
            body[name] = min(body[name], 4) if isinstance(body.get(name), int) else 4
        response = case.call(base_url=url, timeout=60)
        statuses.append(response.status_code)
        case.validate_response(response, checks=[check for check in CHECKS.get_all() if check.__name__ in LOOKED_AT])

    one()
    return statuses

"""Schemathesis against the OpenAPI document of the running service: no 5xx, and only what the document allows."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ckptguard.testing_service import TOKEN, ServeProcess

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_no_request_that_the_document_allows_or_nearly_allows_breaks_the_service(
    served: ServeProcess,
) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        strategy = operation.as_strategy()

        @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=strategy)
        def asked(case: schemathesis.Case) -> None:
            answer = case.call(headers={"Authorization": f"Bearer {TOKEN}"})
            case.validate_response(answer, checks=CHECKS)

        asked()
    assert served.get("/healthz")["status"] in ("ok", "degraded")

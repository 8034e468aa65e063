"""The chat page of ``posttrain serve``: one file at /, which asks the endpoint's own API and loads nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route

from posttrain.backends.endpoint.app import Endpoint
from posttrain.report.harmless import source_hash

BESIDE = "/beside"  # path under which the second model has the whole API


def with_page(endpoint: Endpoint, beside: Endpoint | None = None) -> Starlette:
    """Build the app of an endpoint with its chat page, and with a second model's API under BESIDE."""
    served = [("", endpoint), *([(BESIDE, beside)] if beside else [])]
    page = _page()

    async def show(http: Request) -> Response:
        """Show the page, which holds nothing that needs a token."""
        return endpoint.wrong_host(http) or page

    async def settings(http: Request) -> Response:
        """Report the models and the sampling that requests begin from."""
        return endpoint.refusal(http) or JSONResponse(_settings(served))

    return Starlette(
        routes=[
            Route("/", show),
            Route("/chat/settings", settings),
            *([Mount(BESIDE, app=beside.app())] if beside else []),
            Mount("/", app=endpoint.app()),
        ]
    )


def _settings(served: Sequence[tuple[str, Endpoint]]) -> dict[str, object]:
    plan = served[0][1].plan
    return {
        "models": [{"name": each.plan.model, "base": f"{path}/v1"} for path, each in served],
        "temperature": plan.sampling.temperature,
        "top_p": plan.sampling.top_p,
        "max_tokens": plan.sampling.max_response_tokens,
        "session_header": plan.session_header,
    }


def _page() -> Response:
    """The page, with a policy that allows its own script and style and requests to the endpoint."""
    text = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    script, style = (re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("script", "style"))
    assert script and style
    policy = (
        f"default-src 'none'; script-src {source_hash(script[1])}; style-src {source_hash(style[1])}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(text, headers=headers)

"""What the server is: its version, and the description of its routes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html

import segue
from segue.server.access import UserRoute
from segue.server.errors import json_response

OPENAPI_PATH = "/openapi.json"

router = APIRouter(tags=["About"], route_class=UserRoute)


@router.get("/version")
async def version() -> Response:
    """The version of Segue."""
    return json_response({"version": segue.__version__})


@router.get(OPENAPI_PATH, include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The description of every route."""
    return json_response(request.app.openapi())


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The description as a page to try requests on."""
    return get_swagger_ui_html(openapi_url=OPENAPI_PATH, title=request.app.title)


@router.get("/redoc", include_in_schema=False)
async def redoc(request: Request) -> Response:
    """The description as a page to read."""
    return get_redoc_html(openapi_url=OPENAPI_PATH, title=request.app.title)

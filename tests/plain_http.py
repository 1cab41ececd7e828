"""httpx for servers of this machine: without reading the certificates of the world, which takes 30 ms a call."""

from __future__ import annotations

from functools import partial

import httpx

get = partial(httpx.get, verify=False)
post = partial(httpx.post, verify=False)
stream = partial(httpx.stream, verify=False)
Client = partial(httpx.Client, verify=False)
AsyncClient = partial(httpx.AsyncClient, verify=False)

"""Samplers that run elsewhere: servers whose addresses the configuration names, under the words of three versions."""

from __future__ import annotations

from typing import Any

from posttrain.dialects.reader import Reader
from posttrain.dialects.skyrl.rules.look import get, name_of

_LOCAL = "generator.run_engines_locally"
_URLS = "generator.remote_inference_engine_urls"
# Takes effect for every value of run_engines_locally.
_EXTERNAL = "generator.external_server_urls"
_PROXY = "generator.external_proxy_url"


def addresses(keys: Reader) -> list[str]:
    """Return the addresses of samplers running elsewhere, as written; empty where the run starts its own."""
    external = get(keys, _EXTERNAL)
    if external:
        return list(external)
    return [] if get(keys, _LOCAL) else list(get(keys, _URLS))


def servers(keys: Reader) -> dict[str, Any]:
    """rollout.endpoints; and SkyRL's check b: an address for every sampler."""
    urls, key = addresses(keys), name_of(keys, _URLS)
    external, written = bool(get(keys, _EXTERNAL)), name_of(keys, _EXTERNAL)
    if get(keys, _PROXY) and not external:
        proxy = name_of(keys, _PROXY)
        what = f"{proxy} names a router alone, and weights go to the servers behind it"
        keys.problem(what, key=proxy, fix=f"name them in {proxy.replace('proxy_url', 'server_urls')}")
    if external:
        keys.ignore(key, f"{written} names the samplers")
        colocated = "trainer.placement.colocate_all"
        if keys[colocated]:
            what = f"servers of {written} cannot share the policy's devices"
            keys.problem(what, key=colocated, fix=f"use {colocated}=false")
    elif get(keys, _LOCAL):
        keys.ignore(key, "samplers run locally (run_engines_locally)")
        return {}
    else:
        _one_for_each(keys, urls, key)
    if get(keys, "generator.backend") in ("native", "hf"):
        backend, where = name_of(keys, "generator.backend"), written if external else name_of(keys, _LOCAL)
        what = f"{get(keys, 'generator.backend')} samples in the run's own processes, and not in servers"
        keys.problem(what, key=where, fix=f"use {backend}=vllm or sglang, or remove it")
        return {}
    return {"rollout.endpoints": [url if "://" in url else f"http://{url}" for url in urls]}


def _one_for_each(keys: Reader, urls: list[str], key: str) -> None:
    engines = get(keys, "generator.num_inference_engines")
    if not urls:
        keys.problem(f"{key} names no server", key=key, fix=f"use {key}=[HOST:PORT]")
    elif engines != len(urls):
        number = name_of(keys, "generator.num_inference_engines")
        what = f"there are {len(urls)} addresses ({key}) for {engines} samplers"
        keys.problem(what, key=number, fix=f"use {number}={len(urls)}")

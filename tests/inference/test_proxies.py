"""Requests to this machine go to no proxy."""

from __future__ import annotations

import logging
import os
import urllib.request

import pytest

from turnwise.inference.common.proxies import bypass_proxies, proxy_variables

PROXY = "http://user:secret@127.0.0.1:9"
LOCAL = "127.0.0.1,localhost,::1"


@pytest.mark.parametrize(
    ("given", "url", "expected"),
    [
        ({}, "http://127.0.0.1:80", {}),
        ({"HTTP_PROXY": PROXY}, "http://127.0.0.1:80/s/1", {"NO_PROXY": LOCAL, "no_proxy": LOCAL}),
        ({"all_proxy": PROXY}, "http://[::1]:80", {"NO_PROXY": LOCAL, "no_proxy": LOCAL}),
        ({"http_proxy": PROXY}, "http://10.0.0.7:80", {"NO_PROXY": "10.0.0.7", "no_proxy": "10.0.0.7"}),
        (
            {"HTTP_PROXY": PROXY, "NO_PROXY": "corp.example, localhost"},
            "http://localhost:80",
            dict.fromkeys(("NO_PROXY", "no_proxy"), "corp.example,localhost,127.0.0.1,::1"),
        ),
        ({"HTTP_PROXY": PROXY, "no_proxy": "*"}, "http://127.0.0.1:80", {"NO_PROXY": "*", "no_proxy": "*"}),
    ],
)
def test_hosts_of_this_machine_are_excepted(given: dict, url: str, expected: dict) -> None:
    environment = dict(given)
    bypass_proxies(url, environment)
    assert environment == {
        **given,
        **expected,
    }
    once = dict(environment)
    bypass_proxies(url, environment)
    assert environment == once
    assert proxy_variables(given) == [name for name in given if name.lower() != "no_proxy"]


def test_the_process_is_changed_once_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    with caplog.at_level(logging.WARNING):
        bypass_proxies("http://127.0.0.1:80")
        bypass_proxies("http://127.0.0.1:81")
    [record] = caplog.records
    assert "HTTP_PROXY is set: added 127.0.0.1" in record.getMessage() and "secret" not in record.getMessage()
    assert urllib.request.proxy_bypass("127.0.0.1") and not urllib.request.proxy_bypass("example.com")

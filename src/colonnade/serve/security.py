"""Access rules: hosts, origins and tokens. Pure functions of a request's headers.

A server on a loopback address answers anyone on its machine, and needs the token for administrative calls. On another
address every call needs the token, except those that say whether the server lives and is ready. The name in the header
Host must be the server's own, so that a web page cannot reach it under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from colonnade.errors import ConfigError
from colonnade.serve.protocol import RequestError, quote_value

TOKEN_VARIABLE = "COLONNADE_TOKEN"
MIN_TOKEN = 16
LOOPBACK_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
PUBLIC_PATHS = frozenset(("/", "/v2/health/live", "/v2/health/ready"))
"""Paths that need no token on any address. The page `/` has no figures; it asks for the token to show them."""
ADMIN = "/admin/"


@dataclass(frozen=True)
class AccessPolicy:
    """Rules of one server."""

    token: str | None
    is_loopback: bool
    hosts: frozenset[str]
    """Names in the header Host; IP addresses are accepted on other addresses than loopback."""
    origins: frozenset[str]

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raise RequestError (400, 401, 403) for a request that may not be answered. headers: by lower-case name."""
        host = headers.get("host", "")
        name = parse_host(host)
        is_address = not self.is_loopback and is_ip_address(name)
        if name not in self.hosts and not is_address:
            raise RequestError(
                403 if name else 400,
                f"Host: got {quote_value(host[:100])}, wanted {' or '.join(sorted(self.hosts))}; allow it with "
                "--allowed-host",
            )
        origin = headers.get("origin")
        if origin is not None and not self._is_own_origin(origin, host):
            raise RequestError(
                403,
                f"Origin: got {quote_value(origin[:100])}, wanted this server's own; allow it with --allowed-origin",
            )
        if path.startswith(ADMIN) or not (self.is_loopback or path in PUBLIC_PATHS):
            self.check_token(headers.get("authorization"))

    def check_token(self, authorization: str | None) -> None:
        """Raise RequestError (401, 403) unless the header Authorization has the token."""
        if self.token is None:
            raise RequestError(
                403,
                "got an administrative call, and this server has no token; start it with --token-file",
            )
        scheme, _, value = (authorization or "").partition(" ")
        # Both sides as bytes: compare_digest refuses text that is not ASCII.
        is_right = hmac.compare_digest(
            value.strip().encode("utf-8", "replace"), self.token.encode()
        )
        if scheme.lower() != "bearer" or not is_right:
            raise RequestError(
                401,
                f"Authorization: got {'another' if authorization else 'no'} token, wanted 'Bearer TOKEN'",
            )

    def _is_own_origin(self, origin: str, host: str) -> bool:
        return origin in self.origins or origin.lower() in (
            f"http://{host}".lower(),
            f"https://{host}".lower(),
        )


def parse_host(host: str) -> str:
    """Return the name in a header Host, lower-case, without the port and the brackets of IPv6; "" if it has none."""
    match = re.fullmatch(r"(?:\[([^\]]*)\]|([^:\[]*))(?::\d*)?", host.strip().lower(), re.ASCII)
    return (match[1] or match[2] or "") if match else host


def is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether an address to bind is reachable from this machine only."""
    return host == "localhost" or (is_ip_address(host) and ipaddress.ip_address(host).is_loopback)


def build_policy(
    host: str, token: str | None, allowed_hosts: tuple[str, ...], allowed_origins: tuple[str, ...]
) -> AccessPolicy:
    """Build the rules of a server on this address. Raises ConfigError for an address that needs a token."""
    is_local = is_loopback(host)
    if not is_local and token is None:
        raise ConfigError(
            f"--host: got {host}, which other machines reach, and no token; give --token-file FILE, or set "
            f"{TOKEN_VARIABLE}, or leave --host out"
        )
    own = (
        LOOPBACK_NAMES
        if is_local
        else LOOPBACK_NAMES | {host.lower(), socket.gethostname().lower()}
    )
    hosts = frozenset(own | {name.lower() for name in allowed_hosts})
    return AccessPolicy(token, is_local, hosts, frozenset(allowed_origins))


def read_token(path: Path | None) -> str | None:
    """Read the token from a file, or from COLONNADE_TOKEN; None if there is neither. Raises ConfigError."""
    source = str(path) if path is not None else TOKEN_VARIABLE
    text = path.read_text(encoding="utf-8") if path is not None else os.environ.get(TOKEN_VARIABLE)
    if text is None:
        return None
    token = text.strip()
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{source}: got a token of {len(token)} characters, wanted at least {MIN_TOKEN} ASCII characters "
            "without spaces"
        )
    return token

"""TLS of a server of Segue: its certificate and key, and how its own supervisor reaches it."""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path
from typing import Protocol

from segue.errors import ConfigError

MISMATCH = "KEY_VALUES_MISMATCH"  # OpenSSL's name of it


class TlsOptions(Protocol):
    """The options that decide whether a server speaks TLS; the engine's server and the router have them."""

    @property
    def ssl_certfile(self) -> str | None: ...
    @property
    def ssl_keyfile(self) -> str | None: ...
    @property
    def ssl_keyfile_password(self) -> str | None: ...


def scheme_of(options: TlsOptions) -> str:
    """Return what the URL of the server begins with, "https" or "http"."""
    return "http" if options.ssl_certfile is None else "https"


def server_context(options: TlsOptions) -> ssl.SSLContext | None:
    """Return how a server speaks TLS, with its certificate; None: it speaks plain HTTP.

    The files are read once, at the start.

    Raises:
        ConfigError: only one of the files is given, one cannot be read or is not in PEM form, the key does
            not belong to the certificate, or it is encrypted and the password does not open it.
    """
    certificate, key, password = options.ssl_certfile, options.ssl_keyfile, options.ssl_keyfile_password
    if certificate is None or key is None:
        if certificate is not None or key is not None:
            given, lacks = ("keyfile", "certfile") if certificate is None else ("certfile", "keyfile")
            remedy = "give both, the same file twice if it has both, or neither"
            text = f"ssl_{given} is given without ssl_{lacks}: TLS needs a certificate and its key; {remedy}"
            raise ConfigError(text, param=f"ssl_{lacks}")
        if password is not None:
            text = "ssl_keyfile_password is given without ssl_keyfile, whose password it is; give both files"
            raise ConfigError(text, param="ssl_keyfile_password")
        return None
    _check_pem(certificate, "ssl_certfile", "CERTIFICATE-----", "a certificate")
    _check_pem(key, "ssl_keyfile", "PRIVATE KEY-----", "a private key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    is_encrypted = False

    def tell_password() -> str:
        """Called if the key is encrypted. Without this function OpenSSL would ask at the terminal."""
        nonlocal is_encrypted
        is_encrypted = True
        return password or ""

    try:
        context.load_cert_chain(certificate, key, password=tell_password)
    except (ssl.SSLError, ValueError) as error:  # ValueError: the password is too long
        reason = getattr(error, "reason", None) or str(error)
        if is_encrypted and reason != MISMATCH:
            raise _undecrypted(key, password) from None
        raise _refusal(certificate, key, reason) from None
    return context


@cache
def unverified() -> ssl.SSLContext:
    """Return how a supervisor asks a server that it has started itself whether it is well.

    As Kubernetes' probes do, it takes any certificate: the name in it is that which clients use, and what is
    sent and read is no secret.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _check_pem(path: str, name: str, mark: str, what: str) -> None:
    """Raise ConfigError unless a file can be read and has a part that ends with ``mark``."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        why = f"the file cannot be read ({error.strerror or error})"
        raise ConfigError(f"{name}={path!r}: {why}; give {what} in PEM form", param=name) from None
    if mark.encode() not in text:
        raise ConfigError(f"{name}={path!r}: the file has no {what[2:]} in PEM form; give one", param=name)


def _undecrypted(key: str, password: str | None) -> ConfigError:
    """Return the error for an encrypted key."""
    if password is None:
        text = f"ssl_keyfile={key!r}: the key is encrypted; give its password by --ssl-keyfile-password"
    else:
        text = f"ssl_keyfile_password: the password does not open the key of {key!r}; give the key's own"
    return ConfigError(text, param="ssl_keyfile_password")


def _refusal(certificate: str, key: str, reason: str) -> ConfigError:
    """Return the error for a pair of files that OpenSSL does not take; ``reason`` is what it says."""
    if reason == MISMATCH:
        text = f"ssl_keyfile={key!r}: the key does not belong to the certificate of {certificate!r}"
        return ConfigError(f"{text}; give the key that the certificate was made for", param="ssl_keyfile")
    text = f"ssl_certfile={certificate!r}: OpenSSL cannot use it with the key of {key!r} ({reason})"
    return ConfigError(f"{text}; give a certificate and its key in PEM form", param="ssl_certfile")

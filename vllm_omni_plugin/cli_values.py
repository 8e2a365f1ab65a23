"""Values of the arguments of `vllm-omni-plugin`. Imports the standard library only, so that commands start at once."""

import argparse
import re
from ipaddress import ip_address
from urllib.parse import urlsplit


def http_url(text: str) -> str:
    """The HTTP address of a server, without a slash at its end. Raises ArgumentTypeError."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with http:// or https://")
    try:
        # The system would take a port above 65535 for another one.
        host, port = urlsplit(text).hostname, urlsplit(text).port
        # Python looks names up in this form.
        is_complete = bool(host and host.encode("idna")) and port != 0
    except ValueError:
        is_complete = False
    if not is_complete:
        raise argparse.ArgumentTypeError(f"{text!r} has no valid host, or a port that is not 1 to 65535")
    # vLLM binds this name to IPv4, and somebody else may listen at its other address.
    return re.sub(r"^http://localhost(?=[:/]|$)", "http://127.0.0.1", text.rstrip("/"))


def is_here(url: str) -> bool:
    """Whether the server at this address is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def replica_id(text: str) -> str:
    """The id of a replica, as heads list it. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[0-9]+\.[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not <stage>.<replica>, as `replicas ls` lists them")
    return text

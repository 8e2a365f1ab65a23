"""The probe of nodes, which have no HTTP: exit code 0 if a head lists the engines of this pod as serving."""

import json
import os
import sys
import urllib.request

TIMEOUT_S = 5
IN_SERVICE = ("up", "draining")


def main() -> str | None:
    """Ask a head. Returns why the engines do not serve, or None."""
    address = os.environ["POD_IP"]
    request = urllib.request.Request(os.environ["OMNI_HEAD_URL"] + "/omni/replicas")
    if key := os.environ.get("VLLM_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        # Without the proxies of the environment.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT_S) as answer:
            replicas = json.load(answer)["replicas"]
    except OSError as error:
        return f"no head answers: {error}"
    prefixes = (f"tcp://{address}:", f"tcp://[{address}]:")
    states = [
        replica["status"]
        for replica in replicas
        if replica["input_addr"].startswith(prefixes) or address in replica.get("machines", ())
    ]
    if sum(state in IN_SERVICE for state in states) < int(os.environ["OMNI_REPLICAS"]):
        return f"of {os.environ['OMNI_REPLICAS']} engines at {address}: {states or 'none has joined'}"
    return None


sys.exit(main())

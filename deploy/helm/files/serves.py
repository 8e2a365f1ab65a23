"""The probe of nodes, which have no HTTP: exit code 0 if a head lists the engines of this pod as serving."""

import json
import os
import sys
import urllib.request
from typing import Any

TIMEOUT_S = 5
IN_SERVICE = ("up", "draining")
OTHER_GENERATION, UNUSED = "other-generation", "no head of its kind"


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
    own = [
        replica
        for replica in replicas
        if replica["input_addr"].startswith(prefixes) or address in replica.get("machines", ())
    ]
    if sum(map(serves, own)) < int(os.environ["OMNI_REPLICAS"]):
        states = [replica["status"] for replica in own] or "none has joined"
        return f"of {os.environ['OMNI_REPLICAS']} engines at {address}: {states}"
    return None


def serves(replica: dict[str, Any]) -> bool:
    """Also for heads of another generation than the one that was asked."""
    status = replica["status"]
    return status in IN_SERVICE or (status == OTHER_GENERATION and UNUSED not in replica["other_generation"])


sys.exit(main())

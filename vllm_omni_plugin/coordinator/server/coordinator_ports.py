"""The coordinator's two bound sockets, and the gate in front of them. The runtime's owner says where they are bound."""

import zmq

from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import (
    ROLE,
    Context,
    bind_pub,
    bind_router,
    bound_address,
)
from vllm_omni_plugin.curve import NOTHING_SHOWN, Gate, Secrets


class Ports:
    """Opened together and closed in order.

    Attributes:
        router: For announcements.
        pub: For lists.
        router_address: What `router` is bound to.
        pub_address: What `pub` is bound to.
        gate: Knows how many were refused.
    """

    def __init__(self, router_address: str, pub_address: str, secrets: Secrets | None) -> None:
        """Bind both. Raises `ConfigError`."""
        self._context: Context = zmq.Context()
        # Now: libzmq keeps what an endpoint lingers from its bind on. With its default, for ever, `close` would hang
        # when a connection with unread messages ends in the same moment (libzmq's issues 2733 and 3252).
        self._context.linger = 0
        self.gate = Gate(self._context, secrets)
        self.gate.admit_secret_holders(ROLE)
        if secrets is None:
            self.gate.admit(ROLE, NOTHING_SHOWN)
        try:
            self.router = bind_router(self._context, router_address, secrets, self.gate)
            try:
                self.pub = bind_pub(self._context, pub_address, secrets, self.gate)
            except BaseException:
                self.router.close()
                raise
        except BaseException:
            self._close_gate()
            raise
        self.router_address = bound_address(self.router)
        self.pub_address = bound_address(self.pub)

    def close(self) -> None:
        """Give everything back; what was not sent yet is dropped."""
        self.router.close()
        self.pub.close()
        self._close_gate()

    def _close_gate(self) -> None:
        self.gate.close()
        self._context.term()

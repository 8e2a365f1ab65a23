"""The coordinator's five kinds of sockets and their limits, all in one place; its own two, opened together (`Ports`); a
flag with which any thread ends another one's poll of them (`Wakeup`)."""

import math
import os

import zmq

from vllm_omni_plugin.coordinator.protocol.control_messages import MAX_REPLICA_LIST_BYTES
from vllm_omni_plugin.coordinator.protocol.head_messages import MAX_FRAME_TO_HEAD_BYTES, MAX_HEAD_FRAME_BYTES
from vllm_omni_plugin.curve import (
    HANDSHAKE_FRAME_BYTES,
    HANDSHAKE_MS,
    NO_CREDENTIAL,
    Secrets,
    ZapHandler,
    secure_client,
    secure_server,
)
from vllm_omni_plugin.errors import ConfigError


class Wakeup:
    """A flag that a poller can wait for. `set` and `clear` are thread-safe; neither may be called after `close`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor that is readable while the flag is set."""
        return self._fd

    def set(self) -> None:
        """Set the flag."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Unset the flag, whether it was set or not."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)


ROLE = "coordinator"
"""Of the coordinator's sockets in key derivation, and the ZAP domain of both."""

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

# A link cut without a word is noticed and opened again after about this time, instead of TCP's quarter of an hour; the
# other end gives up on it a little later. As long may a connection take to be made, and its handshake.
LINK_CHECK_MS = 5000
LINK_TTL_MS = 15000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 1000
# Frames queued per peer before TCP pushes back on it: bounds what one peer can make the coordinator hold to 8 MiB.
RECEIVE_QUEUE_FRAMES = 32
# libzmq keeps about 50 bytes for every byte of a topic that somebody subscribes to, without a limit. Our own client
# subscribes to everything, which is no topic.
MAX_SUBSCRIPTION_BYTES = HANDSHAKE_FRAME_BYTES
MAX_TOPICS_PER_PEER = 8
# Each list replaces those before it, so there is no use in keeping many; but dropping the last one would cost 5 s.
LIST_QUEUE_FRAMES = 16
# Each announcement replaces those before it, too; what is queued here while the coordinator is away comes out stale.
EVENT_QUEUE_FRAMES = 4
# What a head may be behind by, each way, before everything is told anew. Some
# 25 of them go each way in a second.
HEAD_QUEUE_FRAMES = 128
LINK_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_LINK_EVENTS = LINK_FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


def bind_router(context: Context, address: str, secrets: Secrets | None, zap_handler: ZapHandler) -> Socket:
    """Return a ROUTER for announcements and heads bound to ``address``; see `bound_address`. Raises `ConfigError`.

    What it sends raises `zmq.ZMQError`: EAGAIN if the peer's queue is full, EHOSTUNREACH if it is not connected.
    """
    router = context.socket(zmq.ROUTER)
    router.maxmsgsize = MAX_HEAD_FRAME_BYTES
    router.rcvhwm = RECEIVE_QUEUE_FRAMES
    router.sndhwm = HEAD_QUEUE_FRAMES
    router.router_mandatory = True
    # The connection of a head that takes nothing for so long is ended, and with it its queue.
    router.tcp_maxrt = LINK_TTL_MS
    _bind(router, address, secrets, zap_handler)
    return router


def bind_pub(context: Context, address: str, secrets: Secrets | None, zap_handler: ZapHandler) -> Socket:
    """Return an XPUB for lists bound to ``address``; it also reads each new subscription. Raises `ConfigError`."""
    pub = context.socket(zmq.XPUB)
    pub.maxmsgsize = MAX_SUBSCRIPTION_BYTES
    pub.rcvhwm = RECEIVE_QUEUE_FRAMES
    pub.sndhwm = LIST_QUEUE_FRAMES
    # Without it only the first of several subscribers is heard of.
    pub.xpub_verbose = True
    _bind(pub, address, secrets, zap_handler)
    return pub


def open_dealer(context: Context) -> Socket:
    """Return a DEALER for announcements, not connected yet."""
    dealer = context.socket(zmq.DEALER)
    # The coordinator never answers: only its handshake comes.
    dealer.maxmsgsize = HANDSHAKE_FRAME_BYTES
    dealer.sndhwm = EVENT_QUEUE_FRAMES
    return dealer


def open_head_dealer(context: Context) -> Socket:
    """Return a DEALER for a head, not connected yet."""
    dealer = context.socket(zmq.DEALER)
    dealer.maxmsgsize = MAX_FRAME_TO_HEAD_BYTES
    dealer.sndhwm = dealer.rcvhwm = HEAD_QUEUE_FRAMES
    return dealer


def open_sub(context: Context) -> Socket:
    """Return a SUB for lists, not connected yet."""
    sub = context.socket(zmq.SUB)
    sub.maxmsgsize = MAX_REPLICA_LIST_BYTES
    sub.rcvhwm = LIST_QUEUE_FRAMES
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    return sub


def connect_watched(socket: Socket, address: str, secrets: Secrets | None, attempt: int) -> Socket:
    """Let ``socket`` stay connected to ``address`` with the secret number ``attempt``; return its monitor.

    The monitor must be read for as long as the socket is open, or libzmq blocks. Raises `ConfigError`.
    """
    socket.ipv6 = "[" in address
    socket.heartbeat_ivl = LINK_CHECK_MS
    socket.heartbeat_ttl = LINK_TTL_MS
    socket.handshake_ivl = LINK_CHECK_MS
    socket.connect_timeout = LINK_CHECK_MS
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = RECONNECT_MAX_MS
    secure_client(socket, secrets, ROLE, attempt)
    monitor = socket.get_monitor_socket(_LINK_EVENTS)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to a coordinator at {address}: {error.strerror}") from error
    return monitor


def bound_address(socket: Socket) -> str:
    """Return the address ``socket`` is bound to, its port resolved."""
    return socket.get_string(zmq.LAST_ENDPOINT)


def poll_ms(seconds: float) -> int:
    """Return ``seconds`` as a poll timeout that never ends before them; 0 if they are over."""
    return max(0, math.ceil(seconds * 1000))


def _bind(socket: Socket, address: str, secrets: Secrets | None, zap_handler: ZapHandler) -> None:
    socket.ipv6 = "[" in address
    socket.handshake_ivl = HANDSHAKE_MS
    secure_server(socket, secrets, ROLE)
    # Needed also where the ZAP handler admits everybody: with a domain, libzmq refuses peers of libzmq 3 or older, for
    # which it knows neither address nor connection.
    socket.zap_domain = ROLE.encode()
    zap_handler.watch(socket, ROLE)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"the coordinator cannot bind {address}: {error.strerror}") from error


class Ports:
    """Opened together and closed in order.

    Attributes:
        router: For announcements.
        pub: For lists.
        router_address: What `router` is bound to.
        pub_address: What `pub` is bound to.
        zap_handler: Knows how many were refused.
    """

    def __init__(self, router_address: str, pub_address: str, secrets: Secrets | None) -> None:
        """Bind both. Raises `ConfigError`."""
        self._context: Context = zmq.Context()
        # Now: libzmq keeps what an endpoint lingers from its bind on. With its default, for ever, `close` would hang
        # when a connection with unread messages ends in the same moment (libzmq's issues 2733 and 3252).
        self._context.linger = 0
        self.zap_handler = ZapHandler(self._context, secrets)
        self.zap_handler.admit_secret_holders(ROLE)
        if secrets is None:
            self.zap_handler.admit(ROLE, NO_CREDENTIAL)
        try:
            self.router = bind_router(self._context, router_address, secrets, self.zap_handler)
            try:
                self.pub = bind_pub(self._context, pub_address, secrets, self.zap_handler)
            except BaseException:
                self.router.close()
                raise
        except BaseException:
            self._close_zap_handler()
            raise
        self.router_address = bound_address(self.router)
        self.pub_address = bound_address(self.pub)

    def close(self) -> None:
        """Give everything back; what was not sent yet is dropped."""
        self.router.close()
        self.pub.close()
        self._close_zap_handler()

    def _close_zap_handler(self) -> None:
        self.zap_handler.close()
        self._context.term()

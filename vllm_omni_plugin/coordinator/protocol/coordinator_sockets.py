"""All sockets of the coordinator and its clients, with their limits, and a flag that ends a poll of them (`Wakeup`)."""

import math
import os
from contextlib import ExitStack, suppress

import zmq

from vllm_omni_plugin import curve
from vllm_omni_plugin.coordinator.protocol.control_messages import MAX_REPLICA_LIST_BYTES
from vllm_omni_plugin.coordinator.protocol.head_messages import MAX_FRAME_TO_HEAD_BYTES, MAX_HEAD_FRAME_BYTES
from vllm_omni_plugin.errors import ConfigError


class Wakeup:
    """A flag for a poller. Thread-safe until `close`."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        os.close(self._fd)


ROLE = "coordinator"
"""The role in key derivation, and the ZAP domain, of the coordinator's sockets."""

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

# Interval and timeout of ZMTP heartbeats, and timeout of a connection attempt and of its handshake. TCP alone would
# notice a cut link only after 15 minutes.
LINK_CHECK_MS = 5000
# The other end closes a silent connection after this time.
LINK_TTL_MS = 15000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 1000
# Frames queued per peer before TCP back-pressure. Bounds the coordinator's memory per peer to 8 MiB.
RECEIVE_QUEUE_FRAMES = 32
# libzmq needs about 50 bytes for each byte of a subscribed topic, without a limit. Our own client uses no topic.
MAX_SUBSCRIPTION_BYTES = curve.HANDSHAKE_FRAME_BYTES
MAX_TOPICS_PER_PEER = 8
# A list replaces the previous ones, so few are enough. A dropped last list would be missing for 5 s.
LIST_QUEUE_FRAMES = 16
# An event replaces the previous ones, too. Events queued while the coordinator is away arrive late.
EVENT_QUEUE_FRAMES = 4
# Frames queued for or by a head, each way, before a full resync. About 25 per second go each way.
HEAD_QUEUE_FRAMES = 128
LINK_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_LINK_EVENTS = LINK_FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


def bind_router(context: Context, address: str, secrets: curve.Secrets | None, zap_handler: curve.ZapHandler) -> Socket:
    """Return the bound ROUTER. Raises `ConfigError`.

    Sending raises `zmq.ZMQError`: EAGAIN if the peer's queue is full, EHOSTUNREACH if the peer is gone.
    """
    router = context.socket(zmq.ROUTER)
    router.maxmsgsize = MAX_HEAD_FRAME_BYTES
    router.rcvhwm = RECEIVE_QUEUE_FRAMES
    router.sndhwm = HEAD_QUEUE_FRAMES
    router.router_mandatory = True
    # The kernel closes the connection of a head that receives nothing for this time. That also frees its queue.
    router.tcp_maxrt = LINK_TTL_MS
    _bind(router, address, secrets, zap_handler)
    return router


def bind_pub(context: Context, address: str, secrets: curve.Secrets | None, zap_handler: curve.ZapHandler) -> Socket:
    """Return the bound XPUB, from which subscriptions can be read. Raises `ConfigError`."""
    pub = context.socket(zmq.XPUB)
    pub.maxmsgsize = MAX_SUBSCRIPTION_BYTES
    pub.rcvhwm = RECEIVE_QUEUE_FRAMES
    pub.sndhwm = LIST_QUEUE_FRAMES
    # Reports each subscriber, not only the first.
    pub.xpub_verbose = True
    _bind(pub, address, secrets, zap_handler)
    return pub


def open_dealer(context: Context) -> Socket:
    dealer = context.socket(zmq.DEALER)
    # The coordinator sends nothing except its handshake.
    dealer.maxmsgsize = curve.HANDSHAKE_FRAME_BYTES
    dealer.sndhwm = EVENT_QUEUE_FRAMES
    return dealer


def open_head_dealer(context: Context) -> Socket:
    dealer = context.socket(zmq.DEALER)
    dealer.maxmsgsize = MAX_FRAME_TO_HEAD_BYTES
    dealer.sndhwm = dealer.rcvhwm = HEAD_QUEUE_FRAMES
    return dealer


def open_sub(context: Context) -> Socket:
    sub = context.socket(zmq.SUB)
    sub.maxmsgsize = MAX_REPLICA_LIST_BYTES
    sub.rcvhwm = LIST_QUEUE_FRAMES
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    return sub


def connect_watched(socket: Socket, address: str, secrets: curve.Secrets | None, attempt: int) -> Socket:
    """Connect with the secret number ``attempt``, and return the socket's monitor. Raises `ConfigError`.

    The monitor must be read while the socket is open, or libzmq blocks.
    """
    socket.ipv6 = "[" in address
    socket.heartbeat_ivl = LINK_CHECK_MS
    socket.heartbeat_ttl = LINK_TTL_MS
    socket.handshake_ivl = LINK_CHECK_MS
    socket.connect_timeout = LINK_CHECK_MS
    socket.reconnect_ivl = RECONNECT_MS
    socket.reconnect_ivl_max = RECONNECT_MAX_MS
    curve.secure_client(socket, secrets, ROLE, attempt)
    monitor = socket.get_monitor_socket(_LINK_EVENTS)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to a coordinator at {address}: {error.strerror}") from error
    return monitor


def poll_ms(seconds: float) -> int:
    """Return a poll timeout in milliseconds that never ends early; 0 for negative ``seconds``."""
    return max(0, math.ceil(seconds * 1000))


def _bind(socket: Socket, address: str, secrets: curve.Secrets | None, zap_handler: curve.ZapHandler) -> None:
    socket.ipv6 = "[" in address
    socket.handshake_ivl = curve.HANDSHAKE_MS
    curve.secure_server(socket, secrets, ROLE)
    # Needed also where the ZAP handler admits everybody: with a domain, libzmq refuses peers of libzmq 3 or older, for
    # which it knows neither address nor connection.
    socket.zap_domain = ROLE.encode()
    zap_handler.watch(socket, ROLE)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"the coordinator cannot bind {address}: {error.strerror}") from error


class CoordinatorSockets:
    """The coordinator's two bound sockets and the ZAP handler that guards them. Raises `ConfigError`."""

    def __init__(self, router_address: str, pub_address: str, secrets: curve.Secrets | None) -> None:
        with ExitStack() as stack:
            context: Context = zmq.Context()
            stack.callback(context.term)
            # Set before bind, when libzmq copies it. With the default, no limit, `close` would hang if a connection
            # with unread messages ends at the same moment (libzmq's issues 2733 and 3252).
            context.linger = 0
            self.zap_handler = curve.ZapHandler(context, secrets)
            stack.callback(self.zap_handler.close)
            self.zap_handler.admit_secret_holders(ROLE)
            if secrets is None:
                self.zap_handler.admit(ROLE, curve.NO_CREDENTIAL)
            self.router = bind_router(context, router_address, secrets, self.zap_handler)
            stack.callback(self.router.close)
            self.pub = bind_pub(context, pub_address, secrets, self.zap_handler)
            stack.callback(self.pub.close)
            self._stack = stack.pop_all()
        self.router_address = self.router.get_string(zmq.LAST_ENDPOINT)
        self.pub_address = self.pub.get_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Close both sockets. Unsent frames are dropped."""
        self._stack.close()

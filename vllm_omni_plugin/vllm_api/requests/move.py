"""The ways in which a request can go on at another replica. Plain data: importing this imports nothing of vLLM."""

from enum import Enum


class Move(Enum):
    """How a request whose replica is lost goes on at another one."""

    RESTART = "restart"
    """From its start. Exact as long as the client has seen nothing of it."""
    RESUME = "resume"
    """What has been delivered becomes part of the prompt, and the budgets shrink by it."""
    REPLAY = "replay"
    """From its start, and what repeats the tokens delivered is swallowed."""
    NEVER = "never"
    """Not at all, once something of it has been delivered."""
    STAYS = "stays"
    """Not at all, whatever has been delivered: it needs what an earlier request of its key has left at its replica."""

"""What an operator wants: classes of requests, bounds of the queue, weights and limits of tenants."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, to_builtins


class Bounds(Struct, frozen=True, kw_only=True):
    """How much may wait, over all heads. None: any amount.

    Attributes:
        max_waiting_requests: requests.
        max_waiting_tokens: tokens of their prompts.
        max_wait: seconds until the last of them would start, at the rate at which requests leave this head's queue.
    """

    max_waiting_requests: int | None = None
    max_waiting_tokens: int | None = None
    max_wait: float | None = None

    @property
    def are_set(self) -> bool:
        """Whether there is any."""
        return (self.max_waiting_requests, self.max_waiting_tokens, self.max_wait) != (None, None, None)


class RequestClass(Bounds, frozen=True, kw_only=True):
    """Requests that go before those of all later classes. The bounds are those of its own requests.

    Attributes:
        name: what people call it.
        priority_at_most: the highest OpenAI priority that belongs here, where the tenant has no class. None: any.
        deadline: seconds to the first token of a request, unless its client waits for less.
    """

    name: str
    priority_at_most: int | None = None
    deadline: float | None = None


class TenantSettings(Struct, frozen=True, kw_only=True, rename={"class_name": "class"}):
    """What one tenant gets.

    Attributes:
        weight: its share of a class, beside the weights of the other tenants that wait there.
        class_name: the class of its requests; None: as their priorities say.
        max_in_flight: its requests that wait or run.
        tokens_per_s: tokens, of prompts and answers.
        burst_tokens: tokens that it may save up while it asks for nothing; None: those of 10 seconds.
    """

    weight: float = 1.0
    class_name: str | None = None
    max_in_flight: int | None = None
    tokens_per_s: float | None = None
    burst_tokens: int | None = None


class AdmissionPlan(Bounds, frozen=True, kw_only=True):
    """All of a file. Its own bounds are those of all classes together.

    Attributes:
        classes: in strict order, at least one.
        tenants: settings by tenant.
        default_tenant: the settings of every other one, and of requests for which none is named.
    """

    classes: tuple[RequestClass, ...] = (RequestClass(name="default"),)
    tenants: Mapping[str, TenantSettings] = {}
    default_tenant: TenantSettings = TenantSettings()

    @property
    def refuses(self) -> bool:
        """Whether there is any bound, deadline or limit."""
        tenants = (self.default_tenant, *self.tenants.values())
        return (
            self.are_set
            or any(each.are_set or each.deadline is not None for each in self.classes)
            or any((each.max_in_flight, each.tokens_per_s) != (None, None) for each in tenants)
        )

    def class_index(self, settings: TenantSettings, priority: int | None) -> int:
        """The place of the class of a tenant's request; for a priority that is not known, of the best that it may be.

        Without a class of its tenant's, that is the first class that takes the priority, or else the last one.
        """
        for index, each in enumerate(self.classes):
            if settings.class_name is not None:
                if each.name == settings.class_name:
                    return index
            elif priority is None or each.priority_at_most is None or priority <= each.priority_at_most:
                return index
        return len(self.classes) - 1


def changes(old: AdmissionPlan, new: AdmissionPlan) -> list[str]:
    """What another plan changes, a line for each value: `classes.batch.max_wait: 60 -> 30`."""
    before, after = _values(old), _values(new)
    return [
        f"{key}: {before.get(key, 'none')} -> {after.get(key, 'none')}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def _values(plan: AdmissionPlan) -> dict[str, Any]:
    """All values by the keys that lead there."""
    values: dict[str, Any] = {}
    _lay_out("", to_builtins(plan), values)
    return values


def _lay_out(name: str, value: Any, values: dict[str, Any]) -> None:
    if isinstance(value, list | tuple):
        # Classes: their order matters, and their names are what people call them.
        value = {each["name"]: {"place": place} | each for place, each in enumerate(value, 1)}
    if isinstance(value, dict):
        for key, each in value.items():
            _lay_out(f"{name}.{key}" if name else key, each, values)
    elif value is not None:
        values[name] = value

"""What is known of each tenant: configured ones for good, those that clients name in bounded number."""

from collections import OrderedDict
from collections.abc import Iterator
from math import ceil, exp2

from vllm_omni_plugin.admission.admission_config import AdmissionConfig, TenantSettings

MAX_ACCOUNTS = 10_000
"""Tenants of clients' invention that are remembered, beside those with requests in flight."""
ACTIVE_S = 60.0
"""Seconds for which a tenant without requests counts as one that may come again at any moment."""
MAX_NAME = 128
"""Characters of a tenant's name; more are cut off."""
_BURST_S = 10.0
_HALF_LIFE_S = 10.0
"""Seconds after which half of what a request cost still counts in its tenant's use: long enough that a tenant whose
requests come close together for seconds is not over its share, and short enough that one whose habits change soon is
what it does now."""
_MEMORY = 1 / 16
"""Weight of the latest answer in the mean length."""


class RecentUse:
    """Tokens of what runs, and of what has ended, the latter counting for less with time."""

    __slots__ = ("_ended", "_ended_at", "running")

    def __init__(self) -> None:
        self.running = 0.0
        self._ended = self._ended_at = 0.0

    def end(self, running: float, tokens: float, now: float, since: float) -> None:
        """What counted as so much while it ran has ended after so many tokens."""
        self.running -= running
        self._ended, self._ended_at = self._ended_by(now, since) + tokens, now

    def tokens(self, now: float, since: float) -> float:
        """All that counts at this time of what runs, and of what has ended since then."""
        return self.running + self._ended_by(now, since)

    def _ended_by(self, now: float, since: float) -> float:
        return 0.0 if self._ended_at <= since else self._ended * exp2(min(0.0, self._ended_at - now) / _HALF_LIFE_S)


class TenantAccount:
    """One tenant at one head.

    Attributes:
        name: "" for requests that name none.
        settings: what it gets.
        in_flight: its requests that wait or run.
        used: by its requests that run, see `Ticket.cost`, and by those that have.
        served_tokens: of prompts and answers of its requests that have ended.
        finish_tags: where its last request ends, by class: see `Ticket.start_tag`.
        mean_output: tokens of its answers; None before the first.
    """

    __slots__ = (
        "_saved",
        "_saved_at",
        "finish_tags",
        "in_flight",
        "mean_output",
        "name",
        "served_tokens",
        "settings",
        "used",
    )

    def __init__(self, name: str, settings: TenantSettings) -> None:
        self.name = name
        self.settings = settings
        self.in_flight = 0
        self.used = RecentUse()
        self.served_tokens = 0
        self.finish_tags: dict[str, float] = {}
        self.mean_output: float | None = None
        # Tokens that it may still use: None before the first.
        self._saved: float | None = None
        self._saved_at = 0.0

    def is_over_in_flight(self, heads: int) -> bool:
        """Whether it has as many requests as this head of so many may let in."""
        most = self.settings.max_in_flight
        return most is not None and self.in_flight >= ceil(most / heads)

    def debt_s(self, heads: int, now: float) -> float:
        """Seconds until it owes no tokens; 0: it may use more now, and owe them. Changes nothing."""
        rate = self._rate(heads)
        if rate is None:
            return 0.0
        return max(0.0, -self._saved_by(rate, heads, now) / rate)

    def use(self, tokens: float, heads: int, now: float) -> None:
        """It uses tokens, and may owe them; or gives some back."""
        rate = self._rate(heads)
        if rate is None:
            self._saved = None
        else:
            self._saved, self._saved_at = self._saved_by(rate, heads, now) - tokens, now

    def answered(self, prompt_tokens: int, output_tokens: int) -> None:
        """One of its requests has ended, after so many tokens."""
        self.served_tokens += prompt_tokens + output_tokens
        mean = self.mean_output
        self.mean_output = output_tokens if mean is None else mean + (output_tokens - mean) * _MEMORY

    def _rate(self, heads: int) -> float | None:
        rate = self.settings.tokens_per_s
        return None if rate is None else rate / heads

    def _saved_by(self, rate: float, heads: int, now: float) -> float:
        burst = rate * _BURST_S if self.settings.burst_tokens is None else self.settings.burst_tokens / heads
        if self._saved is None:
            return burst
        return min(burst, self._saved + rate * max(0.0, now - self._saved_at))


class TenantAccounts:
    """The accounts of one head. All is O(1) but `replace`.

    Written by the orchestrator's loop; what changes nothing may be asked from any thread.

    Attributes:
        active_weight: of the tenants with requests in flight.
        used: see `TenantAccount`, by all.
    """

    def __init__(self, plan: AdmissionConfig) -> None:
        self._plan = plan
        self.active_weight = 0.0
        self.used = RecentUse()
        # When a tenant came that had none of the capacity before: what others used until then was nobody else's.
        self._shared_since = 0.0
        # Those that had requests in flight not long ago, by when that ended, and their weights.
        self._recent: OrderedDict[TenantAccount, float] = OrderedDict()
        self._recent_weight = 0.0
        self._configured = {name: TenantAccount(name, plan.default_tenant) for name in ("",)}
        # Of those that clients named: with requests in flight, and without, the longest unused first.
        self._in_use: dict[str, TenantAccount] = {}
        self._idle: OrderedDict[str, TenantAccount] = OrderedDict()
        self.replace(plan)

    def __iter__(self) -> Iterator[TenantAccount]:
        # Lists at once, since another thread may go through them while accounts come and go.
        return iter([*self._configured.values(), *self._in_use.values(), *self._idle.values()])

    def __len__(self) -> int:
        return len(self._configured) + len(self._in_use) + len(self._idle)

    def replace(self, plan: AdmissionConfig) -> None:
        """Every account has the settings of this plan from now on."""
        accounts = {account.name: account for account in self}
        self._plan = plan
        for name in plan.tenants:
            accounts.setdefault(name, TenantAccount(name, plan.default_tenant))
        for name, account in accounts.items():
            account.settings = self.settings_of(name)
        self.active_weight = sum(each.settings.weight for each in accounts.values() if each.in_flight)
        named = [account for name, account in accounts.items() if name and name not in plan.tenants]
        self._configured = {name: each for name, each in accounts.items() if not name or name in plan.tenants}
        self._in_use = {account.name: account for account in named if account.in_flight}
        self._idle = OrderedDict((account.name, account) for account in named if not account.in_flight)
        self._recent.clear()
        self._recent_weight = 0.0
        self._forget()

    def settings_of(self, name: str) -> TenantSettings:
        """What a tenant gets, whether it is known or not."""
        return self._plan.tenants.get(name[:MAX_NAME], self._plan.default_tenant)

    def get(self, name: str) -> TenantAccount | None:
        """The account of a tenant, None if it has none."""
        name = name[:MAX_NAME]
        return self._configured.get(name) or self._in_use.get(name) or self._idle.get(name)

    def get_or_create(self, name: str) -> TenantAccount:
        """The account of a tenant, a new one if there is none."""
        account = self.get(name)
        if account is None:
            name = name[:MAX_NAME]
            account = self._idle[name] = TenantAccount(name, self.settings_of(name))
            self._forget()
        return account

    def begin(self, account: TenantAccount, now: float) -> None:
        """One more of its requests is in flight."""
        if not account.in_flight:
            self._forget_gone(now)
            if account not in self._recent:
                self._shared_since = now
            self.active_weight += account.settings.weight
            self._forget_recent(account)
        account.in_flight += 1
        if account.name not in self._configured:
            self._idle.pop(account.name, None)
            self._in_use[account.name] = account

    def started(self, account: TenantAccount, cost: float) -> None:
        """A request starts that counts as so much while it runs."""
        account.used.running += cost
        self.used.running += cost

    def ran(self, account: TenantAccount, cost: float, tokens: float, now: float) -> None:
        """The same ends, after so many tokens."""
        account.used.end(cost, tokens, now, self._shared_since)
        self.used.end(cost, tokens, now, self._shared_since)

    def is_over_share(self, account: TenantAccount, now: float) -> bool:
        """Whether it has used more than its share, others being there or only just gone that could use it."""
        self._forget_gone(now)
        weight, since = self.active_weight + self._recent_weight, self._shared_since
        own, by_all = account.used.tokens(now, since), self.used.tokens(now, since)
        # Not for what rounding has left of either.
        return own * weight > by_all * account.settings.weight * (1 + 1e-6)

    def end(self, account: TenantAccount, now: float) -> None:
        """One of its requests is not in flight any more."""
        account.in_flight -= 1
        if not account.in_flight:
            self.active_weight -= account.settings.weight
            # What rounding has left.
            self.used.running -= account.used.running
            account.used.running = 0.0
            self._recent[account] = now
            self._recent_weight += account.settings.weight
            if self._in_use.pop(account.name, None) is not None:
                self._idle[account.name] = account
                self._forget()

    def _forget(self) -> None:
        while self._idle and len(self._idle) + len(self._in_use) > MAX_ACCOUNTS:
            self._forget_recent(self._idle.popitem(last=False)[1])

    def _forget_gone(self, now: float) -> None:
        while self._recent and now - next(iter(self._recent.values())) > ACTIVE_S:
            self._forget_recent(next(iter(self._recent)))

    def _forget_recent(self, account: TenantAccount) -> None:
        if self._recent.pop(account, None) is not None:
            self._recent_weight -= account.settings.weight

"""Per-tenant state: kept for good for tenants of the admission file, in bounded number for tenants named by clients."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, exp2

from vllm_omni_plugin.admission.admission_config import AdmissionConfig, TenantSettings

MAX_ACCOUNTS = 10_000
"""Accounts of tenants that are not in the admission file. More exist only while they have requests in flight."""
ACTIVE_S = 60.0
"""Seconds for which a tenant still counts as active after its last request has ended."""
MAX_NAME = 128
"""Characters of a tenant's name; the rest is cut off."""
_BURST_S = 10.0
_HALF_LIFE_S = 10.0
"""Seconds after which the usage of an ended request counts half. Long enough that a burst of a few seconds does not put
a tenant over its share; short enough to follow a tenant whose load changes."""
_ANSWER_WEIGHT = 1 / 16
"""Weight of the latest answer in the moving average of answer lengths."""


@dataclass(slots=True)
class RecentUsage:
    """Tokens of running requests, plus tokens of ended requests with exponential decay."""

    running: float = 0.0
    _ended: float = 0.0
    _ended_at: float = 0.0

    def end(self, cost: float, tokens: float, now: float, since: float) -> None:
        """A request that counted `cost` while it ran has ended after `tokens`."""
        self.running -= cost
        self._ended, self._ended_at = self._decayed(now, since) + tokens, now

    def tokens(self, now: float, since: float) -> float:
        """The usage now. Ended requests count only if the last one ended after `since`."""
        return self.running + self._decayed(now, since)

    def _decayed(self, now: float, since: float) -> float:
        """Used tokens halve each `_HALF_LIFE_S`; what ended while the tenant was alone does not count."""
        return 0.0 if self._ended_at <= since else self._ended * exp2(min(0.0, self._ended_at - now) / _HALF_LIFE_S)


@dataclass(slots=True, eq=False)
class TenantAccount:
    """One tenant at one head; its `name` is "" for requests without a tenant.

    `in_flight` requests wait or run. `usage` is of running requests, which count their `Ticket.cost`, and of those that
    ended recently. `finish_tags` are, by class, the virtual times at which its last requests finish, see
    `Ticket.start_tag`. `mean_output` is a moving average in tokens, None before the first answer. For `served_tokens`
    see `TenantReport`.
    """

    name: str
    settings: TenantSettings
    in_flight: int = 0
    usage: RecentUsage = field(default_factory=RecentUsage)
    served_tokens: int = 0
    finish_tags: dict[str, float] = field(default_factory=dict)
    mean_output: float | None = None
    # The token bucket: negative when the tenant owes tokens, None when it was never used.
    _saved: float | None = None
    _saved_at: float = 0.0

    def is_at_in_flight_limit(self, heads: int) -> bool:
        """Whether this head's part of `max_in_flight` is used up."""
        limit = self.settings.max_in_flight
        return limit is not None and self.in_flight >= ceil(limit / heads)

    def debt_s(self, heads: int, now: float) -> float:
        """Seconds until the tenant owes no tokens; 0 if it may send a request now."""
        rate = self._rate(heads)
        return 0.0 if rate is None else max(0.0, -self._bucket(rate, heads, now) / rate)

    def spend(self, tokens: float, heads: int, now: float) -> None:
        """Take tokens out of the bucket, which may become negative; a negative number puts tokens back."""
        rate = self._rate(heads)
        if rate is None:
            self._saved = None
        else:
            self._saved, self._saved_at = self._bucket(rate, heads, now) - tokens, now

    def count_answer(self, output_tokens: int) -> None:
        mean = self.mean_output
        self.mean_output = output_tokens if mean is None else mean + (output_tokens - mean) * _ANSWER_WEIGHT

    def _rate(self, heads: int) -> float | None:
        rate = self.settings.tokens_per_s
        return None if rate is None else rate / heads

    def _bucket(self, rate: float, heads: int, now: float) -> float:
        """Tokens that may be used now: what was saved, refilled since, at most the burst."""
        burst = rate * _BURST_S if self.settings.burst_tokens is None else self.settings.burst_tokens / heads
        if self._saved is None:
            return burst
        return min(burst, self._saved + rate * max(0.0, now - self._saved_at))


class TenantAccounts:
    """The accounts of one head, and their sums. Everything is O(1) except `replace` and iteration.

    Only the orchestrator's loop may call methods that change something; any thread may call the others. `active_weight`
    is of the tenants with requests in flight.
    """

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self.active_weight = 0.0
        self.usage = RecentUsage()
        # When a tenant last became active. What others used before that took nothing away from it.
        self._shared_since = 0.0
        # Tenants whose last request ended less than `ACTIVE_S` ago, by when it ended; and their weights.
        self._recent: OrderedDict[TenantAccount, float] = OrderedDict()
        self._recent_weight = 0.0
        self._accounts: dict[str, TenantAccount] = {}
        # Those that may be dropped: not in the file and without requests in flight, the least recently used first.
        self._idle: OrderedDict[str, TenantAccount] = OrderedDict()
        self.replace(config)

    def __iter__(self) -> Iterator[TenantAccount]:
        # A copy, since another thread may iterate while accounts come and go.
        return iter(list(self._accounts.values()))

    def replace(self, config: AdmissionConfig) -> None:
        """Apply another config to every account; tenants that are not in it any more may be forgotten."""
        self._config = config
        for name in ("", *config.tenants):
            self._accounts.setdefault(name, TenantAccount(name, config.default_tenant))
        for account in self:
            account.settings = self.settings_of(account.name)
            if self._is_configured(account.name):
                self._idle.pop(account.name, None)
            elif not account.in_flight and account.name not in self._idle:
                self._idle[account.name] = account
                # Of a tenant that has left the file only a recent use is known.
                self._idle.move_to_end(account.name, last=account in self._recent)
        self.active_weight = sum(each.settings.weight for each in self if each.in_flight)
        self._recent_weight = sum(each.settings.weight for each in self._recent)
        self._drop_idle()

    def settings_of(self, name: str) -> TenantSettings:
        return self._config.tenants.get(name[:MAX_NAME], self._config.default_tenant)

    def get(self, name: str) -> TenantAccount | None:
        return self._accounts.get(name[:MAX_NAME])

    def get_or_create(self, name: str) -> TenantAccount:
        account = self.get(name)
        if account is None:
            name = name[:MAX_NAME]
            account = self._accounts[name] = self._idle[name] = TenantAccount(name, self.settings_of(name))
            self._drop_idle()
        return account

    def add_in_flight(self, account: TenantAccount, now: float) -> None:
        """Count a request. A tenant that was not active lately begins a new comparison: usage until now is forgiven."""
        if not account.in_flight:
            self._expire_recent(now)
            if account not in self._recent:
                self._shared_since = now
            self.active_weight += account.settings.weight
            self._remove_recent(account)
        account.in_flight += 1
        self._accounts[account.name] = account
        self._idle.pop(account.name, None)

    def remove_in_flight(self, account: TenantAccount, now: float) -> None:
        """A request has ended. Its tenant counts as active for `ACTIVE_S` more."""
        account.in_flight -= 1
        if not account.in_flight:
            self.active_weight -= account.settings.weight
            # Clear rounding errors.
            self.usage.running -= account.usage.running
            account.usage.running = 0.0
            self._recent[account] = now
            self._recent_weight += account.settings.weight
            if not self._is_configured(account.name):
                self._idle[account.name] = account
                self._drop_idle()

    def add_running(self, account: TenantAccount, cost: float) -> None:
        account.usage.running += cost
        self.usage.running += cost

    def remove_running(self, account: TenantAccount, cost: float, tokens: float, now: float) -> None:
        """A request that was added with this cost has ended after `tokens`."""
        account.usage.end(cost, tokens, now, self._shared_since)
        self.usage.end(cost, tokens, now, self._shared_since)

    def has_used_more_than_share(self, account: TenantAccount, now: float) -> bool:
        """Whether the tenant has used more than its share, while other tenants are active."""
        self._expire_recent(now)
        weight, since = self.active_weight + self._recent_weight, self._shared_since
        own, total = account.usage.tokens(now, since), self.usage.tokens(now, since)
        # The factor ignores rounding errors.
        return own * weight > total * account.settings.weight * (1 + 1e-6)

    def _is_configured(self, name: str) -> bool:
        return not name or name in self._config.tenants

    def _drop_idle(self) -> None:
        """Forget the longest idle of the tenants not in the admission file, over `MAX_ACCOUNTS`."""
        while self._idle and len(self._accounts) - len(self._config.tenants) - 1 > MAX_ACCOUNTS:
            name, account = self._idle.popitem(last=False)
            del self._accounts[name]
            self._remove_recent(account)

    def _expire_recent(self, now: float) -> None:
        while self._recent and now - next(iter(self._recent.values())) > ACTIVE_S:
            self._remove_recent(next(iter(self._recent)))

    def _remove_recent(self, account: TenantAccount) -> None:
        if self._recent.pop(account, None) is not None:
            self._recent_weight -= account.settings.weight
